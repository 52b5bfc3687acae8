"""Trimming with the semantics of mlx-lm: as many tokens as there are, 0 where it cannot be done."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
)

from kvq.errors import UsageError
from kvq.stock.leaves import leaves


def can_trim_prompt_cache(cache: Sequence[Any]) -> bool:
    """Whether every layer can be trimmed.

    As in mlx-lm, but False too for a ChunkedKVCache that has dropped its first tokens: mlx-lm says
    it can and then cuts its layers at different tokens.
    """
    return all(_can_trim(leaf) for leaf in leaves(cache))


def trim_prompt_cache(cache: Sequence[Any], num_tokens: int) -> int:
    """Remove the last `num_tokens` tokens, in place, and return how many were removed.

    That is all there are if there are fewer, and 0 where the caches cannot be trimmed. Every filled
    layer loses the same number. Raises UsageError for a negative number, which mlx-lm takes to
    mean that many rows of zeros more.
    """
    wanted = operator.index(num_tokens)
    if wanted < 0:
        raise UsageError(f"cannot trim {wanted} tokens: the number must be 0 or more")
    filled = [leaf for leaf in leaves(cache) if not leaf.empty()]
    if not filled or not can_trim_prompt_cache(cache):
        return 0
    count = min(wanted, *(_held(leaf) for leaf in filled))
    for leaf in filled:
        leaf.trim(count)
        if isinstance(leaf, ConcatenateKVCache):
            # mlx-lm moves the offset, and the next update puts it back.
            leaf.keys = leaf.keys[:, :, : leaf.offset]
            leaf.values = leaf.values[:, :, : leaf.offset]
    return count


def _can_trim(leaf: Any) -> bool:
    if isinstance(leaf, ChunkedKVCache) and leaf.start_position > 0:
        return False
    return bool(leaf.is_trimmable())


def _held(leaf: Any) -> int:
    if isinstance(leaf, BatchKVCache):
        return int(leaf._idx)
    if isinstance(leaf, BatchRotatingKVCache):
        return int(leaf._offset)
    return int(leaf.offset)
