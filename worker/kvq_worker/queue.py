"""RQ's queue, with the jobs that wait for another released in one round trip."""

from __future__ import annotations

from typing import Any

from rq.queue import Queue

from kvq.queue import keys
from kvq_worker.scripts import RELEASE


class KvqQueue(Queue):  # type: ignore[misc]
    """RQ reads every waiting job and watches each of its parents; thousands wait for a prefix.

    Here a script does that once the parent is over. Should the worker die in between, maintenance
    finds them.
    """

    def move_dependents_to_ready(self, job: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        """Nothing yet: the job's end is not in Redis at this time."""
        return {}

    def enqueue_ready_jobs_by_queue(self, job_ids_by_queue_name: dict[str, list[str]]) -> None:
        """Nothing, for the same reason."""

    def enqueue_dependents(self, job: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        """Put into the queue, before all others, what waited for `job` and for nothing else."""
        self.connection.register_script(RELEASE)(
            keys=[self.key, keys.registry("deferred", self.name), keys.dependents(job.id)],
            args=[keys.JOB_PREFIX],
        )
        return {}
