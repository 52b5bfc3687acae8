"""What producers and workers exchange through Redis. Nothing here needs MLX."""
