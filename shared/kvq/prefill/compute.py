"""The loop that computes what is missing of one prompt, chunk by chunk, and records it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

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

    The device may go on with the gate's replay. Ends at most one chunk after `on_chunk` raises; the
    error goes on to the caller.
    """
    ids, start = task.ids, caches.tokens
    if start:
        recorder.begin(caches, start)
        gate.begin(caches, start)
    # In one go: an array that is made while the device computes can have to wait for it.
    prompt = mx.array(ids)[None]
    began = time.monotonic()
    on_chunk(start, len(ids))
    ends = chunk_ends(
        start,
        len(ids),
        step=task.step,
        stops=[*task.stops, *gate.stops],
        # A gate listens to the logits of some last tokens, which are a chunk of their own then.
        last_alone=task.keep_logits and not gate.stops,
    )

    def launch(low: int, end: int) -> _Chunk:
        logits = task.model(prompt[:, low:end], cache=caches)[0]
        # The logits of a chunk that nobody listens to are never evaluated.
        heard = gate.listen(caches, logits, end)
        states = [cache.state for cache in caches]
        mark = _mark(states)
        mx.async_eval(states, heard, mark)  # type: ignore[no-untyped-call]
        # While the device computes, the chunk's files are built.
        recorder.capture(caches, end)
        if task.keep_logits and end == len(ids):
            recorder.keep_logits(logits[-1])
        built = recorder.arrays()
        mx.async_eval(built)  # type: ignore[no-untyped-call]
        caches.advance(end - caches.tokens)
        return _Chunk(end, [mark, *heard, *built], recorder.take())

    def land(chunk: _Chunk) -> None:
        mx.eval(chunk.arrays)
        recorder.hand_over(chunk.files)
        on_chunk(chunk.end, len(ids))

    flying = launch(start, ends[0])
    for low, end in pairwise(ends):
        landing, flying = flying, launch(low, end)
        land(landing)
        _free_spare()
    try:
        replayed = gate.prepare(caches)
    finally:
        land(flying)
    seconds = time.monotonic() - began
    mx.async_eval(replayed)  # type: ignore[no-untyped-call]
    return seconds


@dataclass(frozen=True)
class _Chunk:
    """What the device works on until the next chunk is on its way to it, too.

    So the device does not wait for Python between two chunks. It has none of the states: the next
    chunk's rows go where these are, if nobody else holds them.
    """

    end: int
    arrays: list[mx.array]
    files: list[BuiltFile]


def _mark(states: Sequence[Any]) -> mx.array:
    """One number that is there when the chunk is computed, and holds no rows."""
    arrays = [leaf for _, leaf in tree_flatten(states) if isinstance(leaf, mx.array) and leaf.size]
    mark: mx.array = arrays[-1][(0,) * arrays[-1].ndim] + 0
    return mark


def _free_spare() -> None:
    """Give free buffers back to the system where they are many."""
    if mx.get_cache_memory() > memory_bytes() // _SPARE_PART:
        mx.clear_cache()
