"""What a worker does between its jobs: start, wait for the next one, look after the queue."""

from __future__ import annotations

import logging
import re
import secrets
import socket
import time
from collections.abc import Sequence
from os import getpid
from typing import Any

import redis
from rq.exceptions import DequeueTimeout
from rq.job import JobStatus
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty
from rq.utils import now
from rq.worker import SimpleWorker, WorkerStatus

from kvq.settings import Settings
from kvq_worker.job import KvqJob
from kvq_worker.queue import KvqQueue
from kvq_worker.recovery import Recovery

log = logging.getLogger("rq.worker")

#: Exit status after a failure that the worker could not deal with.
FAILED_EXIT_STATUS = 1
#: Seconds: RQ keeps a worker's record this long past its last sign of life, and a minute more.
_WORKER_TTL = 30
_MAINTENANCE_SECONDS = 2
_BLOCK_SECONDS = 1
_IDLE_BEAT_SECONDS = 5
_LONGEST_PAUSE = 2.0


class NoDeathPenalty(BaseDeathPenalty):  # type: ignore[misc]
    """A job's time is watched between its chunks; a signal could end it while it publishes."""

    def setup_death_penalty(self) -> None:
        pass

    def cancel_death_penalty(self) -> None:
        pass


class FetchingWorker(SimpleWorker):  # type: ignore[misc]
    """A worker of JSON jobs that blocks for a second at a time and recovers what others left.

    `rq worker` passes RQ's own defaults for what it was not told; of those, serializer, job and
    queue class, time limits and intervals are replaced, because a pickled job could be anyone's
    code and a dead worker's job would wait for minutes.
    """

    job_class = KvqJob
    queue_class = KvqQueue
    death_penalty_class = NoDeathPenalty
    log_result_lifespan = False

    def __init__(self, queues: Any, name: str | None = None, **options: Any) -> None:
        named = list(queues) if isinstance(queues, Sequence) else [queues]
        if isinstance(queues, str):
            named = [queues]
        connection = options.get("connection")
        if connection is None:
            connection = named[0].connection
        for replaced in ("default_worker_ttl", "job_class", "queue_class"):
            options.pop(replaced, None)
        options |= {
            "connection": connection,
            "worker_ttl": _WORKER_TTL,
            "maintenance_interval": _MAINTENANCE_SECONDS,
            "serializer": JSONSerializer,
        }
        own = [self._own_queue(one, connection) for one in named]
        super().__init__(own, name or _unique_name(), **options)
        self.settings = Settings.from_env()
        self.exit_status = 0
        self._recoveries = [Recovery(self, queue) for queue in self.queues]

    def _own_queue(self, queue: Any, connection: Any) -> KvqQueue:
        return self.queue_class(
            queue if isinstance(queue, str) else queue.name,
            connection=connection,
            job_class=self.job_class,
            serializer=JSONSerializer,
            death_penalty_class=NoDeathPenalty,
        )

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Any, Any] | None:
        """The next job and its queue; None to stop, or when there is none in burst mode."""
        try:
            return self._wait_for_job(timeout is None, max_idle_time)
        except Exception:
            self.exit_status = FAILED_EXIT_STATUS
            raise

    def _wait_for_job(self, burst: bool, max_idle_time: int | None) -> tuple[Any, Any] | None:
        idle_since, beat_at, pause = time.monotonic(), 0.0, 0.1
        while not self._stop_requested:
            try:
                if time.monotonic() >= beat_at:
                    self.set_state(WorkerStatus.IDLE)
                    self.heartbeat()
                    beat_at = time.monotonic() + _IDLE_BEAT_SECONDS
                if self.should_run_maintenance_tasks:
                    self.run_maintenance_tasks()
                return self._dequeue(None if burst else _BLOCK_SECONDS)
            except DequeueTimeout:
                pause = 0.1
                if max_idle_time is not None and time.monotonic() - idle_since > max_idle_time:
                    return None
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
                log.error("Redis cannot be reached (%s); trying again", error)
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
        return None

    def _dequeue(self, timeout: int | None) -> tuple[Any, Any] | None:
        while True:
            try:
                found = self.queue_class.dequeue_any(
                    self.queues,
                    timeout,
                    connection=self.connection,
                    job_class=self.job_class,
                    serializer=self.serializer,
                    death_penalty_class=self.death_penalty_class,
                )
            except Exception as error:
                job_id = getattr(error, "job_id", None)
                if job_id is None:
                    raise
                log.error("left out job %s, which cannot be read: %s", job_id, error)
                self._forget_popped(job_id)
                continue
            if found is None:
                return None
            job, queue = found
            # A job that was canceled, or pushed twice, is still in the list but not to be run.
            if job.get_status(refresh=False) == JobStatus.QUEUED:
                job.origin = queue.name
                job.redis_server_version = self.get_redis_server_version()
                log.debug("%s: %s (%s)", queue.name, job.description, job.id)
                return job, queue
            self._forget_popped(job.id)

    def _forget_popped(self, job_id: str) -> None:
        for queue in self.queues:
            self.connection.lrem(queue.intermediate_queue_key, 1, job_id)

    def clean_registries(self) -> None:
        """Bring back what dead workers left."""
        for recovery in self._recoveries:
            recovery.run()
        self.last_cleaned_at = now()

    def clean_group_registries(self) -> None:
        """Nothing: kvq uses no groups."""


def _unique_name() -> str:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0])[:40] or "worker"
    return f"{host}-{getpid()}-{secrets.token_hex(2)}"
