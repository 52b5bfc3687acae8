"""Cutting tokens off the end of a prompt cache in memory: exactly as many as asked, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvq.cache.adapters import adapter_of
from kvq.cache.container import KVCacheContainer
from kvq.cache.leaves import iter_leaves
from kvq.errors import CannotTrim


def trim(cache: Sequence[Any], n: int) -> int:
    """Cut the newest `n` tokens off every layer of `cache`, in place; returns the tokens left.

    Raises CannotTrim, and changes nothing, when `n` is negative, more than there are, or when a
    layer no longer has what the shorter cache needs: a recurrent state, or a sliding window that
    has dropped the rows before the cut. Its `nearest` is the position that can be had.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise CannotTrim(f"cannot trim {n!r} tokens: give a number from 0 on")
    tokens = tokens_in(cache)
    if n == 0:
        return tokens
    if n > tokens:
        raise CannotTrim(f"cannot trim {n} tokens: the cache has {tokens}", nearest=0)
    for path, leaf in iter_leaves(cache):
        _check(leaf, "layer " + ".".join(map(str, path)), n, tokens)
    for _, leaf in iter_leaves(cache):
        if getattr(leaf, "keys", None) is not None:
            adapter = adapter_of(leaf)
            assert adapter is not None
            adapter.cut(leaf, n)
    if isinstance(cache, KVCacheContainer):
        cache.tokens = tokens - n
        cache.logits = None
    return tokens - n


def tokens_in(cache: Sequence[Any]) -> int:
    """How many tokens a prompt cache covers.

    Recurrent states do not count tokens: for a cache of nothing else only a container knows.
    Raises CannotTrim when the layers disagree.
    """
    offsets = {
        int(leaf.offset)
        for _, leaf in iter_leaves(cache)
        if adapter_of(leaf) is not None and leaf.keys is not None
    }
    if len(offsets) > 1:
        raise CannotTrim(f"the layers disagree on the tokens they cover: {sorted(offsets)}")
    if offsets:
        return offsets.pop()
    return cache.tokens if isinstance(cache, KVCacheContainer) else 0


def _check(leaf: Any, name: str, n: int, tokens: int) -> None:
    adapter = adapter_of(leaf)
    if adapter is None:
        if leaf.empty():
            return
        raise CannotTrim(
            f"cannot trim: {name} is a recurrent state ({type(leaf).__name__}), which exists only "
            f"at the {tokens} tokens it has seen; load the match with `upto` instead",
            nearest=tokens,
        )
    if leaf.keys is None:
        return
    spare = adapter.spare(leaf)
    if n > spare:
        raise CannotTrim(
            f"cannot trim {n} tokens: {name} ({type(leaf).__name__}) has dropped the rows before "
            f"token {tokens - spare}; at most {spare} can go. Load the match with `upto` instead",
            nearest=tokens - spare,
        )
