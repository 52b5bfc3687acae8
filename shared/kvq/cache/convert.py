"""The quantized form of a single cache, where its class and its head dims have one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvq.cache.rotating import QuantizedRotatingKVCache
from kvq.codec import GROUP_SIZES, resolve_group_size
from kvq.codec.live import Codes
from kvq.errors import CannotQuantize

#: Where a cache stands in a prompt cache: its layer, then its place in each CacheList on the way.
Path = tuple[int, ...]


def at(caches: Sequence[Any], path: Path) -> Any:
    """The cache that stands at `path`."""
    cache = caches[path[0]]
    for index in path[1:]:
        cache = cache.caches[index]
    return cache


def put(caches: list[Any], path: Path, cache: Any) -> None:
    """Replace the cache at `path`, in the very list or CacheList that holds it."""
    if len(path) == 1:
        caches[path[0]] = cache
        return
    holder = at(caches, path[:-1])
    parts = list(holder.caches)
    parts[path[-1]] = cache
    holder.caches = type(holder.caches)(parts)


def is_quantized(cache: Any) -> bool:
    """True when mlx-lm attends to `cache` with its quantized kernel."""
    return hasattr(cache, "bits")


def refusal(cache: Any) -> str:
    """Why caches of this class have no quantized form; "" when they have one."""
    if type(cache) in (KVCache, RotatingKVCache):
        return ""
    if isinstance(cache, ArraysCache):
        return "a recurrent state has no keys and values"
    if isinstance(cache, ChunkedKVCache):
        return "mlx-lm slides chunked attention over plain arrays only"
    return f"no quantized form of {type(cache).__name__} is known"


def group_size_of(cache: Any, preferred: int) -> int:
    """The group size for the keys and values of a filled cache.

    Raises CannotQuantize when none divides the dims of both.
    """
    dims = (cache.keys.shape[-1], cache.values.shape[-1])
    size = resolve_group_size(*dims, preferred=preferred)
    if size is None:
        sizes = ", ".join(map(str, GROUP_SIZES))
        listed = " and ".join(str(dim) for dim in dict.fromkeys(dims))
        raise CannotQuantize(f"no group size ({sizes}) divides head dim {listed}")
    return size


def quantized(cache: Any, *, bits: int, group_size: int) -> Any:
    """The quantized form of a filled KVCache or RotatingKVCache. Lazy; `cache` stays whole."""
    if type(cache) is RotatingKVCache:
        return QuantizedRotatingKVCache.of(cache, group_size=group_size, bits=bits)
    after = QuantizedKVCache(group_size=group_size, bits=bits)
    # Without the unused rows: `to_quantized` of mlx-lm spends time and memory on them as well.
    keys, values = cache.keys_and_values()
    after.keys = mx.quantize(keys, group_size=group_size, bits=bits)
    after.values = mx.quantize(values, group_size=group_size, bits=bits)
    after.offset = cache.offset
    return after


def from_codes(
    cache: Any, keys: Codes, values: Codes, *, tokens: int, bits: int, group_size: int
) -> Any:
    """The quantized form of `cache` after `tokens` tokens, made of codes (`kvq.codec.live`).

    `cache` is a KVCache or a RotatingKVCache, of which only the class and the limits count. The
    codes are [1, heads, rows, n] in the order of the tokens: all of them, or what the window
    holds, its first `keep` tokens in front.
    """
    how = {"group_size": group_size, "bits": bits}
    if type(cache) is RotatingKVCache:
        limits = {"max_size": cache.max_size, "keep": cache.keep}
        return QuantizedRotatingKVCache.holding(keys, values, tokens=tokens, **limits, **how)
    after = QuantizedKVCache(**how)
    after.keys, after.values, after.offset = keys, values, tokens
    return after


def blank(cache: Any) -> Any:
    """An empty, unquantized cache that a model treats as it treats `cache`."""
    kind = type(cache)
    if kind in (KVCache, QuantizedKVCache):
        return KVCache()
    if kind in (RotatingKVCache, QuantizedRotatingKVCache):
        return RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    if kind is ArraysCache:
        return ArraysCache(len(cache.cache))
    if kind is ChunkedKVCache:
        return ChunkedKVCache(cache.chunk_size)
    if kind is CacheList:
        return CacheList(*map(blank, cache.caches))
    return copy.deepcopy(cache)
