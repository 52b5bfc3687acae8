"""Looking at a prompt cache as one flat list of caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList


def leaves(cache: Iterable[Any]) -> Iterator[Any]:
    """The caches in order, each CacheList replaced by what it holds."""
    for entry in cache:
        if isinstance(entry, CacheList):
            yield from leaves(entry.caches)
        else:
            yield entry


def arrays(entry: Any) -> list[mx.array]:
    """Every array that one cache holds."""
    return [leaf for _, leaf in tree_flatten(entry.state) if isinstance(leaf, mx.array)]


def covered_tokens(cache: Iterable[Any]) -> int | None:
    """How many tokens the filled caches have seen; None where none counts or they disagree."""
    counts = set()
    for leaf in leaves(cache):
        offset = getattr(leaf, "offset", None)
        if isinstance(offset, int):
            counts.add(0 if leaf.empty() else offset)
    filled = counts - {0} or counts
    return filled.pop() if len(filled) == 1 else None
