"""mlx-lm caches from their parts, as they come out of a file: checked, then re-padded.

A cache in memory grows in steps of 256 rows and attention is faster over such a buffer, so what a
file holds compacted is padded again. Arrays have the shape [batch, heads, rows, head_dim]. All of
it is lazy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvq.stock.faults import Fault

_STEP = 256
_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)

Array = mx.array | None


def kv_cache(keys: Array, values: Array, offset: int) -> KVCache:
    """A KVCache of which the first `offset` rows count."""
    cache = KVCache()
    if _filled(keys, values, offset):
        cache.keys, cache.values = _pad(keys, offset), _pad(values, offset)
        cache.offset = offset
    return cache


def rotating_cache(
    keys: Array, values: Array, offset: int, keep: int, max_size: int, index: int
) -> RotatingKVCache:
    """A RotatingKVCache after `offset` tokens; the next one goes to row `index`."""
    if max_size < 1 or not 0 <= keep <= max_size:
        raise Fault(f"a window of {max_size} rows cannot keep {keep}")
    cache = RotatingKVCache(max_size=max_size, keep=keep)
    rows = 0 if keys is None else _rows(keys)
    if _filled(keys, values, min(offset, rows)):
        if rows < min(offset, max_size - 1):
            raise Fault(f"{rows} rows are too few for {offset} tokens and a window of {max_size}")
        if not 0 <= index <= rows:
            raise Fault(f"the write position {index} is outside its {rows} rows")
        cache.keys, cache.values = keys, values
        cache.offset, cache._idx = offset, index
    elif offset or index:
        raise Fault(f"it is empty, but says it has seen {offset} tokens")
    return cache


def quantized_cache(
    keys: Sequence[mx.array] | None,
    values: Sequence[mx.array] | None,
    offset: int,
    group_size: int,
    bits: int,
) -> QuantizedKVCache:
    """A QuantizedKVCache; keys and values are (packed uint32, scales, biases) each."""
    if group_size not in _GROUP_SIZES or bits not in _BITS:
        raise Fault(f"MLX has no quantization with {bits} bits in groups of {group_size}")
    cache = QuantizedKVCache(group_size=group_size, bits=bits)
    if keys is None or values is None:
        _filled(None if keys is None else keys[0], None if values is None else values[0], offset)
        return cache
    for packed, scales, biases in (keys, values):
        _filled(packed, scales, offset)
        _filled(packed, biases, offset)
        width = packed.shape[-1] * 32
        if packed.dtype != mx.uint32 or width != scales.shape[-1] * group_size * bits:
            raise Fault(f"its arrays are not {bits} bits in groups of {group_size}")
    _filled(keys[0], values[0], offset)
    cache.keys = tuple(_pad(array, offset) for array in keys)
    cache.values = tuple(_pad(array, offset) for array in values)
    cache.offset = offset
    return cache


def arrays_cache(
    slots: Sequence[Array], left_padding: Array = None, lengths: Array = None
) -> ArraysCache:
    """An ArraysCache with these slots; a slot may be None."""
    cache = ArraysCache(size=len(slots))
    cache.cache = list(slots)
    cache.left_padding, cache.lengths = left_padding, lengths
    return cache


def chunked_cache(
    keys: Array, values: Array, offset: int, chunk_size: int, start_position: int
) -> ChunkedKVCache:
    """A ChunkedKVCache after `offset` tokens whose first row is token `start_position`."""
    if chunk_size < 1 or not 0 <= start_position <= offset:
        raise Fault(f"token {start_position} of {offset} cannot be its first row")
    cache = ChunkedKVCache(chunk_size=chunk_size)
    rows = offset - start_position
    if _filled(keys, values, rows):
        cache.keys, cache.values = _pad(keys, rows), _pad(values, rows)
    elif offset:
        raise Fault(f"it is empty, but says it has seen {offset} tokens")
    cache.offset, cache.start_position = offset, start_position
    return cache


def concatenate_cache(keys: Array, values: Array) -> ConcatenateKVCache:
    """A ConcatenateKVCache: all rows count, none are padding."""
    cache = ConcatenateKVCache()
    if _filled(keys, values, 0 if keys is None else _rows(keys)):
        cache.keys, cache.values = keys, values
        cache.offset = _rows(keys)
    return cache


def cache_list(children: Sequence[Any]) -> CacheList:
    """A CacheList of these caches."""
    if not children:
        raise Fault("it holds no caches")
    return CacheList(*children)


def _filled(keys: Array, values: Array, rows: int) -> bool:
    """Whether there are arrays; they must then agree and have at least `rows` rows."""
    if keys is None and values is None:
        if rows:
            raise Fault(f"it has no arrays, but says it holds {rows} tokens")
        return False
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        raise Fault("it has keys or values, but not both")
    if keys.ndim != 4 or values.ndim != 4:
        raise Fault(f"its arrays have {keys.ndim} and {values.ndim} dimensions instead of 4")
    if keys.shape[0] != values.shape[0] or _rows(keys) != _rows(values):
        raise Fault(f"its arrays do not match: {keys.shape} and {values.shape}")
    if not 0 <= rows <= _rows(keys):
        raise Fault(f"it has {_rows(keys)} rows, but says it holds {rows} tokens")
    return True


def _rows(array: Any) -> int:
    return int(array.shape[2])


def _pad(array: Any, rows: int) -> Any:
    padded = -(-rows // _STEP) * _STEP
    if _rows(array) == padded:
        return array
    batch, heads, _, width = array.shape
    tail = mx.zeros((batch, heads, padded - rows, width), dtype=array.dtype)
    return mx.concatenate([array[:, :, :rows], tail], axis=2)
