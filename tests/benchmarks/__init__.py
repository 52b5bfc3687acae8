"""Benchmarks: `python -m benchmarks NAME` from tests/; figures in README.md beside this file."""
