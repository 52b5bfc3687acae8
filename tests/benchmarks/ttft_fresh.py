"""What `ttft` measures in a process of its own: its first prompt, the model loaded before.

python -m benchmarks.ttft_fresh MODEL STORE CODEC resume|least < ids.json > seconds.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx

import kvq
from benchmarks.restore import read_whole
from kvq.generate.llm import StreamStats
from kvq.store.keys import TokenIds, as_ids

RUNS = 5


def main() -> None:
    """Print the seconds that the way of that name takes, at first and then in the median."""
    model, store, codec, way = sys.argv[1:]
    ids = as_ids(json.load(sys.stdin))
    llm = kvq.open(model, store=store)
    measured = {"resume": _resume, "least": _least}[way](llm, ids, codec)
    json.dump(measured, sys.stdout)


def _resume(llm: kvq.LLM, ids: TokenIds, codec: str) -> dict[str, float]:
    """Seconds to the first token."""

    def first_token() -> StreamStats:
        for _ in llm.stream(ids, max_tokens=1, codecs=[codec]):
            pass
        assert llm.last is not None
        return llm.last

    first = first_token()
    later = statistics.median(first_token().ttft_seconds for _ in range(RUNS))
    return {
        "reused": first.reused_tokens,
        "resumed": first.ttft_seconds,
        "load": first.load_seconds,
        "later": later,
    }


def _least(llm: kvq.LLM, ids: TokenIds, codec: str) -> dict[str, float]:
    """Seconds of the two things that no resumed prompt can do without."""
    match = llm.match(ids, codecs=[codec])
    assert match is not None
    paths = [header.path for header in match.plan.files()]
    suffix = mx.array(ids[match.resume_tokens :])[None]

    def read() -> None:
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            list(pool.map(read_whole, paths))

    def forward() -> float:
        caches = match.load(llm.model, upto=match.resume_tokens)
        return _seconds(lambda: mx.eval(llm.model(suffix, cache=caches)[:, -1]))

    first = {"read": _seconds(read), "forward": forward()}
    return {
        **first,
        "later_read": statistics.median(_seconds(read) for _ in range(RUNS)),
        "later_forward": statistics.median(forward() for _ in range(RUNS)),
        "nbytes": sum(path.stat().st_size for path in paths),
    }


def _seconds(way: Callable[[], object]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
