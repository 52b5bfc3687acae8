"""A second set of caches with what the first ones hold, exactly or through a codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvq.cache.adapters import Rows, adapter_of
from kvq.cache.coding import as_heads
from kvq.cache.leaves import leaf_caches
from kvq.codec import SINK_TOKENS, Codec
from kvq.store.keys import BLOCK

#: New rows [layers, heads, tokens, dim] from old ones and the position of the first.
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
            new.cache = copied(old.cache)
        elif old.keys is not None:
            first = 0 if adapter.window(old)[1] else tokens - adapter.held(old)
            keys, values = adapter.rows(old)
            adapter.fill(new, Rows(change(keys, first), change(values, first)), tokens)
    return copies


def copied(state: Sequence[mx.array | None]) -> list[mx.array | None]:
    """Arrays of their own, for a model may write into those of its cache."""
    return [None if array is None else mx.array(array) for array in state]


def unchanged(rows: mx.array, first: int) -> mx.array:
    """The same rows, as an array of their own."""
    return mx.array(rows)


def through(codec: Codec) -> Transform:
    """What a restore gives back of rows that were stored with `codec`, block by block."""

    def again(rows: mx.array, sinks: int) -> mx.array:
        parts = codec.encode(rows, raw_tokens=sinks)
        return codec.decode(parts, dim=rows.shape[-1], dtype=rows.dtype)

    def change(rows: mx.array, first: int) -> mx.array:
        layers, heads, tokens, dim = rows.shape
        stop = first + tokens
        # The whole blocks after the sinks go through together, as if each were a head of its own.
        low = min(stop, -(-max(first, SINK_TOKENS) // BLOCK) * BLOCK)
        high = max(low, stop // BLOCK * BLOCK)
        pieces = []
        if first < low:
            pieces.append(again(rows[:, :, : low - first], max(0, SINK_TOKENS - first)))
        if low < high:
            blocks = as_heads(rows[:, :, low - first : high - first])
            pieces.append(again(blocks, 0).reshape(layers, heads, high - low, dim))
        if high < stop:
            pieces.append(again(rows[:, :, high - first :], 0))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)

    return change
