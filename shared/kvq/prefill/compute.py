"""The loop that computes what is missing of one prompt, chunk by chunk, and records it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvq.cache.container import KVCacheContainer
from kvq.cache.device import memory_bytes
from kvq.cache.recorder import BuiltFile, Recorder
from kvq.prefill.gate import Gate
from kvq.prefill.schedule import chunk_ends
from kvq.store.keys import TokenIds

#: The part of the device's memory that one chunk's free buffers may be of, for the next to use.
_SPARE_PART = 8

#: Called with (tokens done, tokens in all).
OnChunk = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to compute: `ids` from where the caches end, in chunks of `step` tokens.

    `stops` are positions at which a chunk has to end. With `keep_logits` the logits after the
    last token are recorded.
    """

    model: Any
    ids: TokenIds
    step: int
    stops: Sequence[int]
    keep_logits: bool


def compute(
    task: Task, caches: KVCacheContainer, recorder: Recorder, gate: Gate, on_chunk: OnChunk
) -> float:
    """Feed the rest of the prompt and hand every finished block to the recorder; the seconds.

    Ends at most one chunk after `on_chunk` raises; the error goes on to the caller.
    """
    ids, start = task.ids, caches.tokens
    if start:
        recorder.begin(caches, start)
        gate.begin(caches, start)
    spare = memory_bytes() // _SPARE_PART
    began = time.monotonic()
    on_chunk(start, len(ids))
    ends = chunk_ends(
        start,
        len(ids),
        step=task.step,
        stops=[*task.stops, *gate.stops],
        last_alone=task.keep_logits,
    )
    done = start
    flying: list[BuiltFile] = []
    for end in ends:
        logits = task.model(mx.array(ids[done:end])[None], cache=caches)[0]
        # The logits of a chunk that nobody listens to are never evaluated.
        states = [[cache.state for cache in caches], gate.listen(caches, logits, end)]
        mx.async_eval(states)  # type: ignore[no-untyped-call]
        # While the device computes, the chunk's files are built, and those of the one before go to
        # the writer's threads.
        recorder.capture(caches, end)
        if task.keep_logits and end == len(ids):
            recorder.keep_logits(logits[-1])
        built = recorder.arrays()
        mx.async_eval(built)  # type: ignore[no-untyped-call]
        landed, flying = flying, recorder.take()
        recorder.hand_over(landed)
        if done > start:
            on_chunk(done, len(ids))
        mx.eval(states, built)
        if mx.get_cache_memory() > spare:
            mx.clear_cache()
        done = end
        caches.advance(end - caches.tokens)
    recorder.hand_over(flying)
    gate.replay(caches)
    on_chunk(done, len(ids))
    return time.monotonic() - began
