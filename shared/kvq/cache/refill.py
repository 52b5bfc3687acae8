"""A second set of caches with what the first ones hold, exactly or through a codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvq.cache.adapters import Rows, adapter_of
from kvq.cache.leaves import leaf_caches
from kvq.codec import SINK_TOKENS, Codec
from kvq.store.keys import BLOCK

#: New rows [1, heads, tokens, dim] from old ones and the position of the first.
Transform = Callable[[mx.array, int], mx.array]


def refill(model: Any, caches: Sequence[Any], tokens: int, change: Transform) -> Sequence[Any]:
    """New caches of `model`, filled with the rows of `caches` (which cover `tokens`), changed.

    Recurrent states are taken over as they are. Lazy; `caches` are not changed, and what is done
    to the new ones later does not touch them.
    """
    copies: Sequence[Any] = make_prompt_cache(model)
    for old, new in zip(leaf_caches(caches), leaf_caches(copies), strict=True):
        adapter = adapter_of(old)
        if adapter is None:
            new.cache = [None if array is None else mx.array(array) for array in old.cache]
        elif old.keys is not None:
            first = 0 if adapter.window(old)[1] else tokens - adapter.held(old)
            keys, values = adapter.rows(old)
            adapter.fill(new, Rows(change(keys, first), change(values, first)), tokens)
    return copies


def unchanged(rows: mx.array, first: int) -> mx.array:
    """The same rows, as an array of their own."""
    return mx.array(rows)


def through(codec: Codec) -> Transform:
    """What a restore gives back of rows that were stored with `codec`, block by block."""

    def change(rows: mx.array, first: int) -> mx.array:
        stop = first + rows.shape[2]
        cuts = [first, *range(first // BLOCK * BLOCK + BLOCK, stop, BLOCK), stop]
        blocks = []
        for low, high in pairwise(cuts):
            block = rows[:, :, low - first : high - first]
            parts = codec.encode(block, raw_tokens=max(0, SINK_TOKENS - low))
            blocks.append(codec.decode(parts, dim=rows.shape[-1], dtype=rows.dtype))
        return mx.concatenate(blocks, axis=2)

    return change
