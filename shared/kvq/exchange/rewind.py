"""Going back some tokens in caches, for one purpose: feeding those very tokens again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import RotatingKVCache

from kvq.cache.adapters import adapter_of
from kvq.cache.leaves import leaf_caches


def can_rewind(caches: Sequence[Any], count: int) -> bool:
    """Whether the newest `count` tokens can be fed again.

    A recurrent state cannot go back. A sliding window that has wrapped can by one token: what that
    token overwrote is outside its own window.
    """
    return all(_can_rewind(leaf, count) for leaf in leaf_caches(caches))


def rewound(caches: Sequence[Any], count: int) -> list[Any]:
    """Copies of `caches` from which the newest `count` tokens, to be fed next, are taken back.

    Only where `can_rewind` says so.
    """
    copies: list[Any] = [copy.deepcopy(cache) for cache in caches]
    for leaf in leaf_caches(copies):
        adapter = adapter_of(leaf)
        if adapter is None or leaf.keys is None:
            continue
        if adapter.spare(leaf) >= count:
            adapter.cut(leaf, count)
        else:
            # The token is fed alone: its row goes to the place that it already has.
            leaf.offset -= 1
            leaf._idx -= 1
    return copies


def _can_rewind(leaf: Any, count: int) -> bool:
    adapter = adapter_of(leaf)
    if adapter is None or leaf.keys is None:
        return bool(leaf.empty())
    return adapter.spare(leaf) >= count or (isinstance(leaf, RotatingKVCache) and count == 1)
