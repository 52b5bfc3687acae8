"""Tokens from a model and a prompt cache. Needs MLX."""
