"""Brings back what dead workers left: jobs they ran, popped, or should have released."""

from __future__ import annotations

import logging
import re
from typing import Any

from redis.exceptions import ResponseError
from rq import worker_registration
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry

from kvq.queue import keys
from kvq_worker.scripts import RECOVER_POPPED, SWEEP_DEFERRED

log = logging.getLogger("rq.worker")

#: Seconds after which the lock of a worker that died in here is free again. RQ's own is held for
#: 15 minutes then, and nobody recovers anything.
_LOCK_SECONDS = 15
#: Seconds that a job may be popped without being started.
_POPPED_SECONDS = 5
_STRETCH = 2000
_EXECUTION = re.compile(rb"[A-Za-z0-9_-]+:[A-Za-z0-9]+")


class Recovery:
    """Maintenance of one queue, on behalf of `worker`."""

    def __init__(self, worker: Any, queue: Any) -> None:
        self._worker = worker
        self._queue = queue
        self._connection = queue.connection
        self._recover = self._connection.register_script(RECOVER_POPPED)
        self._sweep = self._connection.register_script(SWEEP_DEFERRED)
        self._from = 0

    def run(self) -> None:
        """One pass, unless another worker is at it."""
        lock = self._queue.registry_cleaning_key
        if not self._connection.set(lock, self._worker.name, nx=True, ex=_LOCK_SECONDS):
            return
        try:
            for task in (self._clean_registries, self._recover_popped, self._release_waiting):
                try:
                    task()
                except (ResponseError, ValueError, KeyError):
                    # Somebody's rubbish in one place must not keep the rest from being recovered.
                    log.exception("a part of the maintenance failed")
        finally:
            self._connection.delete(lock)

    def _clean_registries(self) -> None:
        # The server's clock, which the beats go by too: the machines' may differ by more than
        # a lease.
        now = self._connection.time()[0]
        self._drop_malformed(now)
        worker_registration.clean_worker_registry(self._queue)
        for kind in (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry):
            kind(
                self._queue.name,
                connection=self._connection,
                job_class=self._worker.job_class,
                serializer=self._queue.serializer,
            ).cleanup(now)

    def _drop_malformed(self, now: int) -> None:
        wip = keys.registry("wip", self._queue.name)
        expired = self._connection.zrangebyscore(wip, 0, now)
        if bad := [one for one in expired if not _EXECUTION.fullmatch(one)]:
            self._connection.zrem(wip, *bad)

    def _recover_popped(self) -> None:
        name = self._queue.name
        count = self._recover(
            keys=[self._queue.key, keys.intermediate(name), keys.registry("wip", name),
                  f"kvq:popped:{name}"],
            args=[keys.JOB_PREFIX, _POPPED_SECONDS],
        )  # fmt: skip
        if count:
            log.warning("put %d jobs back that a worker had taken and not started", count)

    def _release_waiting(self) -> None:
        self._from, count = self._sweep(
            keys=[self._queue.key, keys.registry("deferred", self._queue.name)],
            args=[keys.JOB_PREFIX, self._from, _STRETCH],
        )
        if count:
            log.warning("released %d jobs whose prefix was over", count)
