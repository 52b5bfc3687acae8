"""Running totals of what workers did to one queue's jobs, in one hash in Redis.

Jobs are forgotten after a lifetime; their sums are not. Workers add to the totals in the
transaction that writes a job's result, so each result counts once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvq.queue.results import State

#: Upper bounds (nats) of the classes that a cache's mean divergence is counted in.
KL_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

# What is counted. The first ones are of results that were stored, by model and codec.
JOBS, CACHES = "jobs", "caches"
TOKENS, PREFILLED, REUSED = "tokens", "prefilled_tokens", "reused_tokens"
BYTES, WRITTEN = "bytes", "bytes_written"
PREFILL_SECONDS, SECONDS = "prefill_seconds", "seconds"
#: Sum of mean divergences, and how many fell into the class that ends at a bound.
KL_SUM, KL_CLASS = "kl_sum", "kl_class"
#: By error code.
FAILED = "failed"
#: Runs that failed and were tried again.
RETRIED = "retried"

_OF_RESULT = (TOKENS, PREFILLED, REUSED, BYTES, WRITTEN, PREFILL_SECONDS, SECONDS)
#: What cannot be added to, because something else stands there, is no reason to fail a job.
_ADD = """
for i = 1, #ARGV, 2 do redis.pcall('HINCRBYFLOAT', KEYS[1], ARGV[i], ARGV[i + 1]) end
"""
#: Nats that a divergence counts for at most; an infinite one would drown all others.
_MOST_KL = 100.0
#: Fields that are read at most, and characters of a label.
_MOST, _LONGEST = 20_000, 200


@dataclass(frozen=True, kw_only=True)
class Total:
    """One sum: what was counted, of what (model and codec, or an error code), and how much."""

    kind: str
    labels: tuple[str, ...]
    value: float


def key(queue: str) -> str:
    """The hash of a queue's totals."""
    return f"kvq:tally:{queue}"


def count_result(pipe: Any, queue: str, result: Mapping[str, Any], *, caches: int) -> None:
    """Add what a job returned (`results.stored` or `failed`) in `pipe`; it wrote `caches`."""
    if result.get("status") != State.STORED.value:
        count_failure(pipe, queue, str(result.get("code", "unknown")))
        return
    model, codec = str(result["model"]), str(result["codec"])
    sums: dict[tuple[str, ...], float] = {(JOBS,): 1, (CACHES,): caches}
    sums |= {(kind,): result[kind] for kind in _OF_RESULT}
    if quality := result["quality"]:
        divergence = min(float(quality["mean_kl"]), _MOST_KL)
        sums[KL_SUM,] = divergence
        sums[KL_CLASS, bound_of(divergence)] = 1
    named = {(kind, model, codec, *more): value for (kind, *more), value in sums.items()}
    _add(pipe, queue, named)


def count_failure(pipe: Any, queue: str, code: str) -> None:
    """Add a job that failed for the reason `code`."""
    _add(pipe, queue, {(FAILED, code): 1})


def count_retry(pipe: Any, queue: str) -> None:
    """Add a run that failed and is tried again."""
    _add(pipe, queue, {(RETRIED,): 1})


def read(connection: Any, queue: str) -> Iterator[Total]:
    """Every total of the queue. What is malformed, and may be anybody's, is left out."""
    for number, (name, value) in enumerate(connection.hscan_iter(key(queue), count=1000)):
        if number >= _MOST:
            return
        try:
            parts, amount = json.loads(name), float(value)
        except (ValueError, TypeError, RecursionError):
            continue
        named = isinstance(parts, list) and parts and all(isinstance(one, str) for one in parts)
        if named and math.isfinite(amount) and amount >= 0:
            kind, *labels = parts
            yield Total(kind=kind, labels=tuple(one[:_LONGEST] for one in labels), value=amount)


def bound_of(divergence: float) -> str:
    """The end of the class that `divergence` (nats) falls into; `+Inf` for the last one."""
    return next((f"{bound:g}" for bound in KL_BOUNDS if divergence <= bound), "+Inf")


def _add(pipe: Any, queue: str, sums: Mapping[tuple[str, ...], float]) -> None:
    arguments = [
        text
        for name, amount in sums.items()
        for text in (json.dumps(name, separators=(",", ":")), repr(amount))
    ]
    pipe.eval(_ADD, 1, key(queue), *arguments)
