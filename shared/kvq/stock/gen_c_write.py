"""Writing generation C, which mlx-lm 0.32.0 and later read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvq.stock.compact import cut

#: The position of each part in the header.
METADATA, CLASSES, SCALARS = "0", "1", "2"


def describe(cache: Any) -> tuple[str, Any]:
    """The class name and the state to write, cut to the rows that count.

    The class of `cache` must be in WRITERS.
    """
    return type(cache).__name__, WRITERS[type(cache)](cache)


def pack(described: list[tuple[str, Any]]) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Tensors and header (without the metadata) for caches from `describe`."""
    arrays: dict[str, mx.array] = {}
    header = {f"{SCALARS}.0": ""}
    count = 0
    for index, (name, state) in enumerate(described):
        header[f"{CLASSES}.{index}"] = name
        for path, leaf in tree_flatten(state):
            kind, arrays[f"{index}.{path}"] = _as_array(leaf)
            if kind is not None:
                count += 1
                header[f"{SCALARS}.{count}.0"] = f"{index}.{path}"
                header[f"{SCALARS}.{count}.1"] = kind
    return arrays, header


def _as_array(leaf: Any) -> tuple[str | None, mx.array]:
    if isinstance(leaf, mx.array):
        return None, leaf
    if leaf is None:
        return "none", mx.array([])
    if isinstance(leaf, str):
        return "string", mx.array([ord(character) for character in leaf])
    return "scalar", mx.array(leaf)


def _write_kv(cache: KVCache) -> Any:
    return cut(cache.keys, cache.offset), cut(cache.values, cache.offset), cache.offset


def _write_rotating(cache: RotatingKVCache) -> Any:
    keys, values = cut(cache.keys, cache.offset), cut(cache.values, cache.offset)
    return keys, values, cache.offset, cache.keep, cache.max_size, cache._idx


def _write_quantized(cache: QuantizedKVCache) -> Any:
    keys, values = cut(cache.keys, cache.offset), cut(cache.values, cache.offset)
    return keys, values, cache.offset, cache.group_size, cache.bits


def _write_arrays(cache: ArraysCache) -> Any:
    return cache.cache, cache.left_padding, cache.lengths


def _write_chunked(cache: ChunkedKVCache) -> Any:
    rows = cache.offset - cache.start_position
    keys, values = cut(cache.keys, rows), cut(cache.values, rows)
    return keys, values, cache.offset, cache.chunk_size, cache.start_position


def _write_concatenate(cache: ConcatenateKVCache) -> Any:
    return cut(cache.keys, cache.offset), cut(cache.values, cache.offset)


def _write_list(cache: CacheList) -> Any:
    return [describe(child)[::-1] for child in cache.caches]


#: How each class is written; any other cannot be.
WRITERS: dict[type, Callable[[Any], Any]] = {
    KVCache: _write_kv,
    RotatingKVCache: _write_rotating,
    QuantizedKVCache: _write_quantized,
    ArraysCache: _write_arrays,
    ChunkedKVCache: _write_chunked,
    ConcatenateKVCache: _write_concatenate,
    CacheList: _write_list,
}
