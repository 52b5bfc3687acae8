"""Figures of one queue, from Redis."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from kvq.queue import keys, tally
from kvq.queue.tally import Total
from kvq_producer.metrics import table
from kvq_producer.metrics.samples import Sample
from kvq_producer.metrics.table import Metric

#: Of so many jobs at the head of the queue the oldest is looked for.
_HEAD = 100
#: Characters of a label.
_LONGEST = 200

_COUNTERS: dict[str, Metric] = {
    tally.JOBS: table.STORED,
    tally.CACHES: table.CACHES,
    tally.TOKENS: table.TOKENS,
    tally.PREFILLED: table.PREFILLED,
    tally.REUSED: table.REUSED,
    tally.PREFILL_SECONDS: table.PREFILL_SECONDS,
    tally.SECONDS: table.JOB_SECONDS,
    tally.WRITTEN: table.WRITTEN,
    tally.FAILED: table.FAILED,
    tally.RETRIED: table.RETRIED,
}


def queue_samples(connection: Any, queue: str) -> Iterator[Sample]:
    """Figures of `queue` now. May raise redis errors."""
    from redis.exceptions import NoPermissionError, ResponseError

    yield from _jobs(connection, queue)
    yield from _workers(connection, queue)
    with contextlib.suppress(ResponseError):  # somebody put something else there
        yield from _totals(queue, list(tally.read(connection, queue)))
    with contextlib.suppress(NoPermissionError):
        used = connection.info("memory").get("used_memory", 0)
        yield Sample(metric=table.REDIS_MEMORY, value=float(used))


def _jobs(connection: Any, queue: str) -> Iterator[Sample]:
    names = ("deferred", "wip", "finished", "failed")
    with connection.pipeline(transaction=False) as pipe:
        pipe.llen(keys.queue(queue))
        for name in names:
            pipe.zcard(keys.registry(name, queue))
        pipe.zcard(keys.BATCHES)
        pipe.time()
        pipe.lrange(keys.queue(queue), 0, _HEAD - 1)
        waiting, deferred, running, finished, failed, batches, now, head = pipe.execute()
    counts = {
        "waiting": waiting, "deferred": deferred, "running": running, "finished": finished,
        "failed": failed,
    }  # fmt: skip
    for state, count in counts.items():
        yield Sample(metric=table.JOBS, labels=(queue, state), value=count)
    yield Sample(metric=table.BATCHES, value=batches)
    waited = _longest_wait(connection, head, now[0]) if head else 0.0
    yield Sample(metric=table.OLDEST, labels=(queue,), value=waited)


def _longest_wait(connection: Any, head: Sequence[bytes], now: int) -> float:
    with connection.pipeline(transaction=False) as pipe:
        for job_id in head:
            pipe.hget(keys.job(_text(job_id)), "enqueued_at")
        found = pipe.execute(raise_on_error=False)
    moments = (_seconds(one) for one in found if isinstance(one, bytes))
    return max((now - moment for moment in moments if 0 < moment <= now), default=0.0)


def _workers(connection: Any, queue: str) -> Iterator[Sample]:
    names = sorted(connection.smembers(f"{keys.WORKERS}:{queue}"))
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(name, "state", "kvq_model")
        found = pipe.execute(raise_on_error=False)
    counts: Counter[tuple[str, str]] = Counter()
    for one in found:
        if isinstance(one, list) and one[0]:
            counts[_text(one[0]), _text(one[1] or b"")] += 1
    if not counts:
        counts["idle", ""] = 0
    for (state, model), count in counts.items():
        yield Sample(metric=table.WORKERS, labels=(queue, state, model), value=count)


def _totals(queue: str, totals: Sequence[Total]) -> Iterator[Sample]:
    of_kind: dict[str, dict[tuple[str, ...], float]] = {}
    for one in totals:
        of_kind.setdefault(one.kind, {})[one.labels] = one.value
    for kind, metric in _COUNTERS.items():
        for labels, value in of_kind.get(kind, {}).items():
            if len(labels) + 1 == len(metric.labels):
                yield Sample(metric=metric, labels=(queue, *labels), value=value)
    written = of_kind.get(tally.WRITTEN, {})
    for labels, value in of_kind.get(tally.BYTES, {}).items():
        if len(labels) == 2:
            reused = max(0.0, value - written.get(labels, 0.0))
            yield Sample(metric=table.REUSED_BYTES, labels=(queue, *labels), value=reused)
    for labels, value in of_kind.get(tally.KL_SUM, {}).items():
        classes = {
            name[2]: count
            for name, count in of_kind.get(tally.KL_CLASS, {}).items()
            if len(name) == 3 and name[:2] == labels
        }
        if len(labels) == 2:
            yield Sample(
                metric=table.DIVERGENCE, labels=(queue, *labels), value=value, classes=classes
            )


def _seconds(moment: bytes) -> float:
    try:
        parsed = datetime.strptime(_text(moment), "%Y-%m-%dT%H:%M:%S.%fZ")
    except ValueError:
        return 0.0
    return parsed.replace(tzinfo=UTC).timestamp()


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")[:_LONGEST]
