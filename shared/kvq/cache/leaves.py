"""A prompt cache as a flat list of leaves: nested lists opened, each described for the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from kvq.cache.adapters import adapter_of
from kvq.cache.dtypes import dtype_name
from kvq.store.space import Leaf


def iter_leaves(caches: Sequence[Any]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(path, cache) of every leaf, in a fixed order."""
    for index, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            for path, leaf in iter_leaves(cache.caches):
                yield (index, *path), leaf
        else:
            yield (index,), cache


def leaf_caches(caches: Sequence[Any]) -> list[Any]:
    """The leaf caches themselves, in the order of `describe`."""
    return [cache for _, cache in iter_leaves(caches)]


def describe(caches: Sequence[Any]) -> tuple[Leaf, ...]:
    """What each leaf keeps, from caches that have seen at least one token of one sequence.

    Raises UnsupportedModel for a class that kvq does not know, and for more than one sequence.
    """
    return tuple(_describe(path, cache) for path, cache in iter_leaves(caches))


def check_supported(caches: Sequence[Any]) -> None:
    """Raise UnsupportedModel if any leaf is of a class that kvq does not know."""
    for cache in leaf_caches(caches):
        adapter_of(cache)


def _describe(path: tuple[int, ...], cache: Any) -> Leaf:
    adapter = adapter_of(cache)
    name = type(cache).__name__
    if adapter is None:
        return Leaf(path=path, cache_class=name, record="state", slots=len(cache.cache))
    if cache.keys is None:
        return Leaf(path=path, cache_class=name, record="empty")
    rows = adapter.newest(cache, 1)
    window, keep = adapter.window(cache)
    return Leaf(
        path=path,
        cache_class=name,
        record=adapter.record,
        window=window,
        keep=keep,
        keys=_heads_and_dim(rows.keys),
        values=_heads_and_dim(rows.values),
        keys_dtype=dtype_name(rows.keys.dtype),
        values_dtype=dtype_name(rows.values.dtype),
    )


def _heads_and_dim(rows: mx.array) -> tuple[int, int]:
    _, heads, _, dim = rows.shape
    return heads, dim
