"""Caches that are whole in memory, written as blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvq.cache.adapters import Rows, adapter_of
from kvq.cache.leaves import leaf_caches
from kvq.cache.recorder import Recorder
from kvq.exchange.empty import CachesOf
from kvq.store import Space, Store
from kvq.store.keys import TokenIds
from kvq.store.writer import Writer

#: Tokens whose files are built at a time, so that little is in memory twice.
STEP = 2048


def record(
    store: Store,
    space: Space,
    caches: Sequence[Any],
    ids: TokenIds,
    *,
    kept: Sequence[int],
    logits: mx.array | None,
) -> int:
    """Write the blocks of `caches`, which cover `ids`, and the `logits`; the bytes written.

    What the store has already is not written again. Raises StoreUnavailable.
    """
    writer = Writer(store)
    recorder = Recorder(
        space=space, folder=store.add_space(space), ids=ids, kept=kept, writer=writer
    )
    try:
        for end in _ends(space, len(ids)):
            recorder.capture(_upto(space, caches, end, len(ids)), end)
            if end == len(ids) and logits is not None:
                recorder.keep_logits(logits)
            mx.eval(recorder.arrays())
            recorder.hand_over(recorder.take())
            mx.clear_cache()
        writer.finish()
    finally:
        writer.close()
    recorder.remove_checkpoints()
    return writer.bytes_written


def _ends(space: Space, tokens: int) -> list[int]:
    """Positions at which to build files: only the end where something exists only there."""
    if space.needs.state or space.needs.keep:
        return [tokens]
    return [*range(STEP, tokens, STEP), tokens]


def _upto(space: Space, caches: Sequence[Any], end: int, tokens: int) -> Sequence[Any]:
    """What of `caches`, which cover `tokens`, is of the tokens before `end`."""
    if end == tokens:
        return caches
    earlier = CachesOf(space).make_cache()
    for new, old in zip(leaf_caches(earlier), leaf_caches(caches), strict=True):
        adapter = adapter_of(old)
        if adapter is not None and old.keys is not None:
            count = max(0, end - (tokens - adapter.held(old)))
            keys, values = adapter.rows(old)
            adapter.fill(new, Rows(keys[..., :count, :], values[..., :count, :]), end)
    return earlier
