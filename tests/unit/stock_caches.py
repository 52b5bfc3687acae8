"""Small filled caches of every class, and what it means that two are the same."""

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


def feed(
    cache: Any,
    *chunks: int,
    width: int = 8,
    value_width: int | None = None,
    dtype: mx.Dtype = mx.float32,
) -> Any:
    """Random keys and values in chunks of these many tokens, [2, 3, chunk, width] each."""
    for tokens in chunks:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()  # as the model does before each chunk
        widths = width, width if value_width is None else value_width
        cache.update_and_fetch(
            *(mx.random.normal((2, 3, tokens, each)).astype(dtype) for each in widths)
        )
    return cache


def slots(cache: ArraysCache, *filled: int) -> ArraysCache:
    for slot in filled:
        cache[slot] = mx.random.normal((2, 3 + slot, 5))
    return cache


def trimmed(cache: Any, tokens: int) -> Any:
    assert cache.trim(tokens) == tokens
    return cache


def _padded_batch() -> ArraysCache:
    cache = slots(ArraysCache(2, left_padding=[1, 0]), 0, 1)
    cache.prepare(lengths=[4, 3])
    return cache


FILLED: dict[str, Callable[[], Any]] = {
    "full": lambda: feed(KVCache(), 10),
    "full, of exactly one step": lambda: feed(KVCache(), 256),
    "full, of two steps": lambda: feed(KVCache(), 250, 10, 3),
    "full, trimmed": lambda: trimmed(feed(KVCache(), 10), 4),
    "full, trimmed to nothing": lambda: trimmed(feed(KVCache(), 10), 10),
    "full, bfloat16": lambda: feed(KVCache(), 10, dtype=mx.bfloat16),
    "full, float16": lambda: feed(KVCache(), 10, dtype=mx.float16),
    "full, values of no width": lambda: feed(KVCache(), 10, value_width=0),
    "window, open": lambda: feed(RotatingKVCache(8, keep=2), 5),
    "window, open and grown": lambda: feed(RotatingKVCache(300), 5, 1, 1),
    "window, open and trimmed": lambda: trimmed(feed(RotatingKVCache(8), 5, 1), 3),
    "window, just full": lambda: feed(RotatingKVCache(8), 8),
    "window, wider than its size": lambda: feed(RotatingKVCache(8, keep=2), 12),
    "window, rotated": lambda: feed(RotatingKVCache(8, keep=2), 12, 1, 1, 1),
    "window, rotated to its end": lambda: feed(RotatingKVCache(8), 7, 1),
    "quantized, 8 bits": lambda: feed(QuantizedKVCache(32, 8), 10, 1, width=64),
    "quantized, 4 bits": lambda: feed(QuantizedKVCache(64, 4), 10, width=64),
    "quantized, trimmed": lambda: trimmed(feed(QuantizedKVCache(64, 8), 10, width=64), 4),
    "quantized late": lambda: feed(KVCache(), 10, width=64).to_quantized(32, 4),
    "chunked": lambda: feed(ChunkedKVCache(256), 10),
    "chunked, trimmed": lambda: trimmed(feed(ChunkedKVCache(256), 10), 3),
    "concatenated": lambda: feed(ConcatenateKVCache(), 4, 3),
    "recurrent": lambda: slots(ArraysCache(2), 0, 1),
    "recurrent, three slots": lambda: slots(ArraysCache(3), 0, 1, 2),
}

#: What generation A cannot hold, or mlx-lm cannot read back from it.
ONLY_C: dict[str, Callable[[], Any]] = {
    "chunked, its front dropped": lambda: feed(ChunkedKVCache(4), 3, 4, 2),
    "recurrent, a slot missing": lambda: slots(ArraysCache(3), 1),
    "recurrent, a padded batch": _padded_batch,
    "list": lambda: CacheList(feed(KVCache(), 5), slots(ArraysCache(1), 0)),
    "list in a list": lambda: CacheList(KVCache(), CacheList(feed(RotatingKVCache(3), 5, 1))),
    "list of empty caches": lambda: CacheList(KVCache(), ArraysCache(2)),
    "empty full": KVCache,
    "empty window": lambda: RotatingKVCache(8, keep=4),
    "empty quantized": lambda: QuantizedKVCache(32, 4),
    "empty recurrent": lambda: ArraysCache(2),
    "empty chunked": lambda: ChunkedKVCache(16),
    "empty concatenated": ConcatenateKVCache,
}

ALL = FILLED | ONLY_C


def contents(cache: Any) -> list[Any]:
    """Everything that decides what a cache will do: class, numbers, and the rows that count."""
    if isinstance(cache, CacheList):
        return ["list", *(contents(child) for child in cache.caches)]
    numbers = {
        key: value for key, value in sorted(vars(cache).items()) if isinstance(value, (int, str))
    }
    if isinstance(cache, ArraysCache):
        held: Any = [*cache.cache, cache.left_padding, cache.lengths]
    elif cache.empty():
        held = []
    else:
        held = cache.keys_and_values()
    return [type(cache).__name__, numbers, *(leaf for _, leaf in tree_flatten(held))]


def assert_same(one: Any, other: Any) -> None:
    """Equal in class, numbers and, bit for bit, in every row that counts."""
    _assert_equal(contents(one), contents(other))


def _assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, mx.array):
        assert isinstance(other, mx.array)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert mx.array_equal(one, other)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_equal(a, b)
    else:
        assert one == other
