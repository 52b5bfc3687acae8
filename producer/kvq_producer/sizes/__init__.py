"""How many bytes a model's caches take, from its config.json alone."""

from __future__ import annotations

from kvq_producer.sizes.architectures import shape_of
from kvq_producer.sizes.shape import CacheShape, Rows, known_codec

__all__ = ["CacheShape", "Rows", "known_codec", "shape_of"]
