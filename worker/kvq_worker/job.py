"""RQ's job, reduced to what a worker may safely run: one function, JSON, nothing called back."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from kvq.queue import tally
from kvq.queue.keys import FIELD_OUTCOME, RQ
from kvq.queue.messages import JOB_FUNCTION
from kvq.queue.results import State
from kvq_worker.untrusted import sanitized

#: Field of RQ's hash of a worker: the model of the last prompt that it stored.
FIELD_MODEL = "kvq_model"

#: Payload of a finished job: what is stored need not be kept in Redis too.
_SPENT = zlib.compress(json.dumps([JOB_FUNCTION, None, [], {}]).encode())


class KvqJob(Job):  # type: ignore[misc]
    """A job that can only be `kvq_worker.jobs.prefill`, whatever its hash in Redis says."""

    def __init__(self, id: str | None = None, connection: Any = None, serializer: Any = None):
        super().__init__(id, connection=connection, serializer=JSONSerializer)

    @property
    def func(self) -> Callable[..., Any]:
        """The prefill function. Raises PermissionError for any other name."""
        if self.func_name != JOB_FUNCTION or self.instance is not None:
            raise PermissionError(f"a kvq worker runs {JOB_FUNCTION} only, not this job's function")
        from kvq_worker.jobs import prefill

        return prefill

    @property
    def success_callback(self) -> None:
        return None

    @property
    def failure_callback(self) -> None:
        return None

    @property
    def stopped_callback(self) -> None:
        return None

    def send_webhooks(self, status: Any, *, exc_string: str | None = None) -> None:
        """Nothing: a job does not make this machine call anybody."""

    def refresh(self) -> None:
        """Read the hash anew. Raises NoSuchJobError also where there is something else."""
        try:
            super().refresh()
        except ResponseError as error:
            raise NoSuchJobError(f"{self.id} is not a job: {error}") from error

    def restore(self, raw_data: Any) -> None:
        """Take over what is sound of the hash. Raises NoSuchJobError when it holds no job."""
        clean = sanitized(raw_data)
        if b"data" not in clean:
            raise NoSuchJobError(f"{self.id} is not a job")
        super().restore(clean)

    def to_dict(self, include_meta: bool = True, include_result: bool = True) -> dict[str, Any]:
        """RQ's fields, and for a job that has returned its outcome in a word."""
        fields: dict[str, Any] = super().to_dict(include_meta, include_result)
        if isinstance(self._result, dict) and isinstance(self._result.get("status"), str):
            fields[FIELD_OUTCOME] = self._result["status"]
            if self._result["status"] == State.STORED:
                fields["data"] = _SPENT
        fields.pop("result", None)
        return fields

    # RQ hands its transaction to these; the totals change with the job or not at all.

    def _handle_success(self, result_ttl: Any, pipeline: Any, *args: Any, **kwargs: Any) -> None:
        super()._handle_success(result_ttl, pipeline, *args, **kwargs)
        result = self._result
        if not isinstance(result, dict) or "status" not in result:
            return
        stored = result["status"] == State.STORED
        caches = len(self.args[0].get("caches", ())) if stored else 0
        tally.count_result(pipeline, self.origin, result, caches=caches)
        if stored and (worker := kwargs.get("worker_name")):
            pipeline.hset(f"{RQ}:worker:{worker}", FIELD_MODEL, result["model"])

    def _handle_failure(self, exc_string: str, pipeline: Any, *args: Any, **kwargs: Any) -> None:
        super()._handle_failure(exc_string, pipeline, *args, **kwargs)
        died = "AbandonedJobError" in exc_string[-4000:]
        tally.count_failure(pipeline, self.origin, "worker_died" if died else "worker_failed")

    def retry(self, queue: Any, pipeline: Any) -> None:
        """Run the job again."""
        super().retry(queue, pipeline)
        tally.count_retry(pipeline, self.origin)
