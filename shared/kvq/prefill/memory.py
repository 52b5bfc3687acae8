"""Prefixes that this process has just computed, kept in memory for the prompts that share them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvq.cache.container import KVCacheContainer
from kvq.cache.refill import refill, unchanged
from kvq.store.keys import TokenIds, pack


class PrefixMemory:
    """The latest prefixes of one model, at most `limit` bytes of them; the oldest go first."""

    def __init__(self, model: Any, limit: int) -> None:
        self._model = model
        self._limit = limit
        self._entries: OrderedDict[bytes, tuple[KVCacheContainer, int]] = OrderedDict()

    def put(self, ids: TokenIds, caches: Sequence[Any], lossy_tokens: int) -> None:
        """Remember the caches of `ids`; the memory owns them from now on.

        `lossy_tokens` is how many of the tokens were restored from a lossy codec.
        """
        entry = KVCacheContainer(caches, tokens=len(ids))
        if entry.nbytes > self._limit:
            return
        self._entries[pack(ids)] = entry, lossy_tokens
        self._entries.move_to_end(pack(ids))
        while sum(one.nbytes for one, _ in self._entries.values()) > self._limit:
            self._entries.popitem(last=False)

    def take(self, ids: TokenIds) -> tuple[KVCacheContainer, int] | None:
        """A copy of the caches of exactly `ids` and their lossy tokens, or None."""
        found = self._entries.get(pack(ids))
        if found is None:
            return None
        entry, lossy_tokens = found
        self._entries.move_to_end(pack(ids))
        copies = refill(self._model, entry, entry.tokens, unchanged)
        mx.eval([cache.state for cache in copies])
        return KVCacheContainer(copies, tokens=entry.tokens), lossy_tokens

    def clear(self) -> None:
        self._entries.clear()
