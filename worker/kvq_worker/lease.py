"""One execution's hold on its job: kept alive by beats, given up at the end."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from kvq.queue import keys
from kvq.queue.enqueue import RETRIES
from kvq_worker.scripts import BEAT, END


class Lease:
    """The hold that `execution` has on `job`, for `seconds` from each beat on."""

    def __init__(self, worker: Any, job: Any, execution: Any, *, seconds: float) -> None:
        connection, queue = worker.connection, job.origin
        self._beat = connection.register_script(BEAT)
        self._end = connection.register_script(END)
        self._seconds = max(1, round(seconds))
        self._worker_ttl = worker.worker_ttl + 60
        self._job_id = job.id
        self._execution_id = execution.id
        self._member = execution.composite_key
        executions = f"{keys.RQ}:executions:{job.id}"
        wip = keys.registry("wip", queue)
        self._wip = wip
        self._connection = connection
        self._beat_keys = [
            wip, keys.job(job.id), execution.key, executions, worker.key, worker.executions_key,
        ]  # fmt: skip
        self._end_keys = [
            wip, keys.job(job.id), execution.key, executions, worker.executions_key,
            keys.queue(queue), keys.registry("canceled", queue),
        ]  # fmt: skip

    def beat(self, start: int | None, done: int, total: int) -> tuple[bool, bool, bool]:
        """Extend the hold and report progress in tokens; `start` were stored when the job began.

        Returns whether the job is still held, whether it was canceled, and whether Redis has
        forgotten the worker.
        """
        reply = self._beat(
            keys=self._beat_keys,
            args=[
                self._member, self._execution_id, self._seconds, self._worker_ttl, done, total,
                _text_now(), time.time(), "" if start is None else start, RETRIES,
            ],
        )  # fmt: skip
        return bool(reply[0]), bool(reply[1]), bool(reply[2])

    def held(self) -> bool:
        """Whether no other worker has taken the job over."""
        return self._connection.zscore(self._wip, self._member) is not None

    def retries_left(self) -> int | None:
        """How often the job may be run again."""
        left = self._connection.hget(keys.job(self._job_id), "retries_left")
        return min(RETRIES, int(left[:6])) if left and left.isdigit() else None

    def end(self, how: str) -> bool:
        """Give the job up without a result: `again` (run it next), `canceled`, or `lost`.

        Returns whether it was held; if not, nothing of it is touched.
        """
        args = [self._member, self._execution_id, self._job_id, how, _text_now(), time.time()]
        return bool(self._end(keys=self._end_keys, args=args))


def _text_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
