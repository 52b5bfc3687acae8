"""Prompt caches in memory: reading, filling, cutting and quantizing them. Needs MLX."""
