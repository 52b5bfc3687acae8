"""Puts jobs into RQ's queue, many in one round trip, each at most once.

Everything that kvq must know of how RQ lays out a job is here and in `keys` and `scripts`.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from kvq.queue import keys, scripts
from kvq.queue.messages import JOB_FUNCTION, PrefillMessage
from kvq.queue.shared_ids import SharedPrefix

#: Jobs in one call of the script: it runs in one piece, so others wait for it.
CALL = 100
#: How often a job is run again after its worker died or failed.
RETRIES = 3

_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, kw_only=True)
class JobToEnqueue:
    """A job under its id, after the jobs `parents`; `front` puts it before all that wait.

    Without `trust`, a finished job of the same id is run again.
    """

    id: str
    message: PrefillMessage
    parents: tuple[str, ...] = ()
    front: bool = False
    trust: bool = True

    @cached_property
    def payload(self) -> bytes:
        """The call as RQ stores it: most of the work of enqueueing, so it can be made ahead."""
        call: list[Any] = [JOB_FUNCTION, None, [self.message.encode()], {}]
        return zlib.compress(_encode(call).encode(), 1)


class Enqueuer:
    """Enqueues the jobs of one batch. `timeout` and `lifetime` are seconds."""

    def __init__(
        self, connection: Any, queue: str, *, batch: str, timeout: float, lifetime: float
    ) -> None:
        self._connection = connection
        self._enqueue = connection.register_script(scripts.ENQUEUE)
        self._keep = connection.register_script(scripts.KEEP)
        self._batch = batch
        self._lifetime = max(1, int(lifetime))
        self._keys = [
            keys.queue(queue),
            keys.QUEUES,
            *(
                keys.registry(kind, queue)
                for kind in ("deferred", "finished", "failed", "canceled")
            ),
        ]
        self._common = {
            "origin": queue,
            "timeout": max(1, int(timeout)),
            "result_ttl": self._lifetime,
            "failure_ttl": self._lifetime,
            "retries_left": RETRIES,
            "retry_intervals": "[0]",
            "enqueue_at_front": 1,
            "enqueue_at_front_on_retry": 1,
            "allow_dependency_failures": 1,
        }

    def enqueue(
        self, jobs: Sequence[JobToEnqueue], prefixes: Iterable[tuple[SharedPrefix, bytes]] = ()
    ) -> list[str]:
        """Enqueue `jobs` in one round trip, shared `prefixes` with them.

        Returns a word for each job: `new`, `deferred` (waits for its parents), `pending` (the same
        work is under way), or `done`. Repeating a call whose reply was lost changes nothing.
        """
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        common = [
            text
            for pair in {**self._common, "created_at": stamp, "enqueued_at": stamp}.items()
            for text in pair
        ]
        head = [keys.JOB_PREFIX, keys.RESULTS_PREFIX, self._batch, self._lifetime]
        head += [int(time.time()), len(common), *common]
        with self._connection.pipeline(transaction=False) as pipe:
            skip = 0
            for prefix, packed in prefixes:
                self._keep(keys=[prefix.key], args=[packed, self._lifetime], client=pipe)
                skip += 1
            for start in range(0, len(jobs), CALL):
                args = head.copy()
                for job in jobs[start : start + CALL]:
                    args += _arguments(job)
                self._enqueue(keys=self._keys, args=args, client=pipe)
            replies = pipe.execute()[skip:]
        return [word.decode() for reply in replies for word in reply]


def run_script(connection: Any, script: str) -> Callable[..., Any]:
    """The Lua `script` as a function of `keys` and `args`."""
    run: Callable[..., Any] = connection.register_script(script)
    return run


def _arguments(job: JobToEnqueue) -> list[Any]:
    place = "L" if job.front else "R"
    return [job.id, place, int(job.trust), job.payload, describe(job.message),
            len(job.parents), *job.parents]  # fmt: skip


def describe(message: PrefillMessage) -> str:
    """What people see of a job in RQ's own tools; never the prompt's text."""
    model = message.model.rstrip("/").rsplit("/", 1)[-1]
    if not message.caches:
        return f"prefix of {message.tokens} tokens for {model}"[:120]
    return f"{message.tokens} tokens for {model}: {message.caches[0].name}"[:120]
