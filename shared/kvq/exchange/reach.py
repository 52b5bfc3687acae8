"""Where caches that came out of a file can be resumed: at its end, and how far before it."""

from __future__ import annotations

import mlx.core as mx

from kvq.cache.adapters import adapter_of
from kvq.cache.container import KVCacheContainer
from kvq.cache.leaves import leaf_caches


def first_position(caches: KVCacheContainer) -> int:
    """The first position (tokens) at which every layer of `caches` can be resumed."""
    first = 0
    for leaf in leaf_caches(caches):
        adapter = adapter_of(leaf)
        if adapter is None:
            first = max(first, 0 if leaf.empty() else caches.tokens)
        elif leaf.keys is not None:
            first = max(first, caches.tokens - adapter.spare(leaf))
    return first


def where(caches: KVCacheContainer, first: int, logits: mx.array | None) -> tuple[str, ...]:
    """Where the cache can be resumed, if not anywhere."""
    notes = []
    if first == caches.tokens:
        notes.append(f"it can be resumed after all of its {first} tokens, not before")
    elif first:
        notes.append(f"it can be resumed from {first} tokens on")
    if logits is None:
        notes.append(
            "the logits after its last token cannot be computed from it: it serves longer prompts, "
            "not a repetition of its own"
        )
    return tuple(notes)
