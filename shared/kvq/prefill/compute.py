"""The loop that computes what is missing of one prompt, chunk by chunk, and records it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvq.cache.recorder import Recorder
from kvq.prefill.schedule import chunk_ends
from kvq.store.keys import TokenIds
from kvq.store.match import Match

OnChunk = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Computed:
    """`reused` tokens were restored, the rest took `seconds`; `logits` ([vocab]) are the last's."""

    reused: int
    seconds: float
    caches: Sequence[Any]
    logits: mx.array


def compute(
    model: Any,
    match: Match,
    recorder: Recorder,
    *,
    step: int,
    stops: Sequence[int],
    keep_logits: bool,
    on_chunk: OnChunk,
) -> Computed:
    """Restore what `match` has, feed the rest, and hand every finished block to the recorder.

    Ends at most one chunk after `on_chunk` raises; the error goes on to the caller.
    """
    ids = match.ids
    caches = match.load(model, upto=match.resume_tokens)
    start = caches.tokens
    if start:
        recorder.begin(caches, start)
    began = time.monotonic()
    on_chunk(start, len(ids))
    logits = None
    done = start
    for end in chunk_ends(start, len(ids), step=step, stops=stops, last_alone=keep_logits):
        logits = model(_chunk(ids, done, end), cache=caches)[0, -1]
        recorder.capture(caches, end)
        last = end == len(ids)
        if last and keep_logits:
            recorder.keep_logits(logits)
        # Logits of a chunk that is not the last are never evaluated.
        mx.eval([cache.state for cache in caches], recorder.arrays(), logits if last else [])
        recorder.hand_over()
        mx.clear_cache()
        done = end
        on_chunk(done, len(ids))
    assert logits is not None
    return Computed(reused=start, seconds=time.monotonic() - began, caches=caches, logits=logits)


def _chunk(ids: TokenIds, start: int, end: int) -> mx.array:
    return mx.array(ids[start:end].astype(np.uint32))[None]
