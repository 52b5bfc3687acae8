"""Figures of a queue and of stores, for Prometheus."""
