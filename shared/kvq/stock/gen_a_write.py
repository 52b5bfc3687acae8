"""Writing generation A, which mlx-lm 0.19.1 to 0.28.0 reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvq.errors import CacheError
from kvq.stock.compact import cut

#: The position of each part in the header.
INFO, METADATA, CLASSES = "0", "1", "2"
_STEP = 256


def describe(cache: Any) -> tuple[str, Any, Any]:
    """Class name, header fields and state to write. Raises CacheError with the reason."""
    kind = type(cache)
    if kind not in WRITERS:
        raise CacheError(f"mlx-lm before 0.28.1 cannot read a {kind.__name__}")
    if cache.empty():
        raise CacheError("mlx-lm before 0.28.1 cannot read an empty cache")
    return WRITERS[kind](cache)


def pack(described: list[tuple[str, Any, Any]]) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Tensors and header (without the metadata) for caches from `describe`."""
    arrays: dict[str, mx.array] = {}
    header: dict[str, str] = {}
    for index, (name, info, state) in enumerate(described):
        header[f"{CLASSES}.{index}"] = name
        header |= tree_flatten(info, prefix=f".{INFO}.{index}", destination={})
        arrays |= tree_flatten(state, prefix=f".{index}", destination={})
    return arrays, header


def _kv(cache: KVCache | ConcatenateKVCache) -> tuple[str, Any, Any]:
    state = cut(cache.keys, cache.offset), cut(cache.values, cache.offset)
    return type(cache).__name__, "", state


def _rotating(cache: RotatingKVCache) -> tuple[str, Any, Any]:
    state = cut(cache.keys, cache.offset), cut(cache.values, cache.offset)
    fields = cache.keep, cache.max_size, _STEP, cache.offset, cache._idx
    return "RotatingKVCache", list(map(str, fields)), state


def _quantized(cache: QuantizedKVCache) -> tuple[str, Any, Any]:
    state = cut(cache.keys, cache.offset), cut(cache.values, cache.offset)
    fields = _STEP, cache.offset, cache.group_size, cache.bits
    return "QuantizedKVCache", list(map(str, fields)), state


def _recurrent(cache: ArraysCache) -> tuple[str, Any, Any]:
    if cache.left_padding is not None or cache.lengths is not None:
        raise CacheError("it belongs to a padded batch: extract each sequence first")
    if any(slot is None for slot in cache.cache):
        raise CacheError("mlx-lm before 0.28.1 cannot read a cache with an empty slot")
    # ArraysCache existed late in this generation, but could not be read back. MambaCache takes
    # any number of slots.
    return "MambaCache", "", cache.cache


def _chunked(cache: ChunkedKVCache) -> tuple[str, Any, Any]:
    if cache.start_position > 0:
        raise CacheError(
            "its first tokens were dropped, and mlx-lm before 0.32.0 restores such a cache at a "
            "wrong position"
        )
    state = cut(cache.keys, cache.offset), cut(cache.values, cache.offset)
    return "ChunkedKVCache", [str(cache.chunk_size), "0"], state


#: How each class is written; any other cannot be.
WRITERS: dict[type, Callable[[Any], tuple[str, Any, Any]]] = {
    KVCache: _kv,
    ConcatenateKVCache: _kv,
    RotatingKVCache: _rotating,
    QuantizedKVCache: _quantized,
    ArraysCache: _recurrent,
    ChunkedKVCache: _chunked,
}
