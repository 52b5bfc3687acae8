"""RQ's queue, with the jobs that wait for another released in one round trip."""

from __future__ import annotations

import logging
import re
from typing import Any

from rq.queue import Queue

from kvq.queue import keys
from kvq_worker.scripts import RELEASE

log = logging.getLogger("rq.worker")

_PORTION = 2000
JOB_ID = re.compile(rb"[A-Za-z0-9_-]{1,200}")


class KvqQueue(Queue):  # type: ignore[misc]
    """RQ reads every waiting job and watches each of its parents; thousands wait for a prefix.

    Here a script does that once the parent is over. Should the worker die in between, maintenance
    finds them.
    """

    @classmethod
    def lmove(cls, connection: Any, queue_key: str, timeout: int | None) -> Any:
        """Pop the next id, leaving out what is no job's id; see RQ for the rest."""
        while True:
            found = super().lmove(connection, queue_key, timeout)
            if found is None or JOB_ID.fullmatch(found[1]):
                return found
            log.error("left out %r in the queue, which is no job's id", found[1][:80])
            connection.lrem(f"{queue_key}:intermediate", 1, found[1])

    @classmethod
    def _fetch_dequeued_job(
        cls, connection: Any, queue_key: str, job_id: str, **options: Any
    ) -> tuple[Any, Any] | None:
        found: tuple[Any, Any] | None
        found = super()._fetch_dequeued_job(connection, queue_key, job_id, **options)
        if found is None:
            # RQ leaves the id of a job that is gone in the list of popped ones.
            connection.lrem(f"{queue_key}:intermediate", 1, job_id)
        return found

    def move_dependents_to_ready(self, job: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        """Nothing yet: the job's end is not in Redis at this time."""
        return {}

    def enqueue_ready_jobs_by_queue(self, job_ids_by_queue_name: dict[str, list[str]]) -> None:
        """Nothing, for the same reason."""

    def enqueue_dependents(self, job: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        """Put into the queue, before all others, what waited for `job` and for nothing else."""
        release, more = self.connection.register_script(RELEASE), True
        waiting = [self.key, keys.registry("deferred", self.name), keys.dependents(job.id)]
        while more:
            # Redis does nothing else while a script runs, so thousands go in portions.
            more, _ = release(keys=waiting, args=[keys.JOB_PREFIX, _PORTION])
        return {}
