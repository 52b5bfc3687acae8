"""Empty caches as a space describes them, so that a restore needs no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

from kvq.errors import UnsupportedModel
from kvq.store.space import Leaf, Space

_MAKERS: dict[str, Callable[[Leaf], Any]] = {
    "KVCache": lambda leaf: KVCache(),
    "ConcatenateKVCache": lambda leaf: ConcatenateKVCache(),
    # A layer that keeps nothing says nothing of its window either.
    "RotatingKVCache": lambda leaf: RotatingKVCache(max_size=leaf.window or 1, keep=leaf.keep),
    "ChunkedKVCache": lambda leaf: ChunkedKVCache(chunk_size=leaf.window or 1),
    "ArraysCache": lambda leaf: ArraysCache(size=leaf.slots),
}


class CachesOf:
    """Stands in for the model of `space` where only `make_prompt_cache` is asked of it."""

    def __init__(self, space: Space) -> None:
        self._leaves = space.leaves

    def make_cache(self) -> list[Any]:
        """Empty caches, nested as the model's. Raises UnsupportedModel for a class unknown here."""
        return _nested([(leaf.path, leaf) for leaf in self._leaves])


def _nested(leaves: Sequence[tuple[tuple[int, ...], Leaf]]) -> list[Any]:
    """Caches of leaves with the rest of each one's path."""
    inner: dict[int, list[tuple[tuple[int, ...], Leaf]]] = {}
    for (index, *rest), leaf in leaves:
        inner.setdefault(index, []).append((tuple(rest), leaf))
    return [_made(inner[index]) for index in sorted(inner)]


def _made(leaves: Sequence[tuple[tuple[int, ...], Leaf]]) -> Any:
    path, leaf = leaves[0]
    if path:
        return CacheList(*_nested(leaves))
    maker = _MAKERS.get(leaf.cache_class)
    if maker is None:
        raise UnsupportedModel(f"a {leaf.cache_class} cannot be made without its model")
    return maker(leaf)
