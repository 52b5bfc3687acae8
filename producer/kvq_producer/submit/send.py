"""Sends a batch to the queue."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvq.queue import keys, scripts
from kvq.queue.batch import Batch, BatchFacts, new_id
from kvq.queue.enqueue import Enqueuer, JobToEnqueue, run_script
from kvq.queue.shared_ids import SharedPrefix
from kvq.settings import Settings
from kvq.store.parallel import ordered
from kvq_producer.plan import PlannedJob
from kvq_producer.submit.garbage import seldom_collected
from kvq_producer.submit.intake import Intake
from kvq_producer.submit.jobs import Work
from kvq_producer.submit.wish import Wish

#: Jobs in one round trip, and bytes of token ids, so that neither side holds much at once: three
#: trips may be made ahead.
_JOBS = 500
_BYTES = 4 << 20
#: How often a batch is looked over for jobs that a restart of the server lost.
_CHECKS = 3


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A batch that is in the queue; `words` counts its jobs by what the queue said of each."""

    batch: Batch
    words: Counter[str]


@seldom_collected()
def send(
    connection: Any,
    intake: Intake,
    wish: Wish,
    settings: Settings,
    *,
    again: bool = False,
    on_progress: Callable[[int], None] = lambda jobs: None,
) -> Sent:
    """Remember the batch and enqueue its jobs; `on_progress` hears how many at a time.

    Sending it again changes nothing: the same work has the same ids. May raise redis errors.
    """
    batch_id = new_id()
    work = Work(intake=intake, wish=wish, batch=batch_id, again=again)
    totals, now = intake.plan.totals, time.time()
    prompts, prefixes = work.entries()
    facts = BatchFacts(
        id=batch_id,
        created=now,
        expires=now + settings.batch_lifetime,
        queue=settings.queue,
        source=intake.source,
        models=tuple(sorted({one.group.model for one in intake.plan.groups})),
        store=wish.store,
        prompts=len(prompts),
        jobs=len(intake.plan.jobs),
        tokens=totals.tokens,
        work=totals.prefill_tokens,
    )
    batch = Batch.create(connection, facts, prompts, prefixes)
    enqueuer = Enqueuer(
        connection,
        settings.queue,
        batch=batch_id,
        timeout=settings.job_timeout,
        lifetime=settings.batch_lifetime,
    )
    words = _enqueue(enqueuer, work, on_progress)
    # A server that restarts forgets the last second, jobs that it had confirmed among it.
    for _ in range(_CHECKS):
        if not missing_jobs(connection, work.ids):
            break
        batch = Batch.create(connection, facts, prompts, prefixes)
        _enqueue(enqueuer, work, lambda jobs: None)
    batch.mark_submitted()
    return Sent(batch=batch, words=words)


def missing_jobs(connection: Any, job_ids: Sequence[str]) -> int:
    """How many of the jobs Redis does not know."""
    status = run_script(connection, scripts.STATUS)
    count = 0
    for start in range(0, len(job_ids), _JOBS):
        letters = status(args=[keys.JOB_PREFIX, *job_ids[start : start + _JOBS]])[0]
        count += letters.count(b"l")
    return count


def _enqueue(enqueuer: Enqueuer, work: Work, on_progress: Callable[[int], None]) -> Counter[str]:
    words: Counter[str] = Counter()
    kept: set[SharedPrefix] = set()

    def load(trip: tuple[int, int]) -> tuple[list[JobToEnqueue], list[tuple[SharedPrefix, bytes]]]:
        pairs = list(work.jobs(*trip))
        jobs = [job for job, _ in pairs]
        for job in jobs:
            job.payload  # noqa: B018
        new = {prefix for _, prefix in pairs if prefix is not None} - kept
        kept.update(new)
        return jobs, [(prefix, work.packed(prefix)) for prefix in new]

    # While the server takes one trip in, the next is made.
    for _, (jobs, prefixes) in ordered(load, _trips(work.intake.plan.jobs), threads=1):
        words.update(enqueuer.enqueue(jobs, prefixes))
        on_progress(len(jobs))
    return words


def _trips(jobs: Sequence[PlannedJob]) -> Iterator[tuple[int, int]]:
    """The places at which each trip starts and before which it ends."""
    stop = 0
    while stop < len(jobs):
        start, stop = stop, _end_of_trip(jobs, stop)
        yield start, stop


def _end_of_trip(jobs: Sequence[PlannedJob], start: int) -> int:
    """The place after the last job of the trip that begins at `start`; at least one goes."""
    tokens, stop = 0, start
    while stop < len(jobs) and stop - start < _JOBS and (stop == start or tokens * 4 < _BYTES):
        tokens += jobs[stop].tokens
        stop += 1
    return stop
