"""Between the store and stock mlx-lm files. Above store, cache, prefill and stock. Needs MLX."""

from __future__ import annotations

from kvq.exchange.exporting import Exported, export_cache
from kvq.exchange.importing import ImportRequest, import_cache

__all__ = ["Exported", "ImportRequest", "export_cache", "import_cache"]
