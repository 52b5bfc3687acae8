"""The RQ worker that keeps its model in memory and loses no job."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version
from typing import Any

from rq import worker_registration
from rq.worker import WorkerStatus

from kvq.errors import Stopped, StoreError, StoreUnavailable
from kvq_worker import logs
from kvq_worker.control import Cause, Control
from kvq_worker.fetching import FAILED_EXIT_STATUS, FetchingWorker
from kvq_worker.heartbeat import Heartbeat
from kvq_worker.lease import Lease
from kvq_worker.models import Models
from kvq_worker.sentry import Sentry
from kvq_worker.session import CURRENT, Session
from kvq_worker.storage import STORE_EXIT_STATUS, Stores

log = logging.getLogger("rq.worker")

#: Exit status after an evaluation that hung (EX_SOFTWARE).
HUNG_EXIT_STATUS = 70
#: How long (seconds) a worker that was told to stop still waits for Redis.
_STOPPING_PATIENCE = 5.0


class ResidentWorker(FetchingWorker):
    """Runs prefill jobs one by one in this process, on its main thread.

    Told to stop, it ends its job after the chunk that is being computed; what is finished is
    stored, and the job is the next one that any worker takes.
    """

    def __init__(self, queues: Any, name: str | None = None, **options: Any) -> None:
        super().__init__(queues, name, **options)
        self.models = Models(self.settings)
        self.stores = Stores(self.settings)
        self._control: Control | None = None
        self._lease: Lease | None = None

    # From start to end

    def work(self, *args: Any, **kwargs: Any) -> bool:
        """RQ's loop. Ends the process with a status other than 0 when it cannot go on."""
        logs.set_up(self.settings.log_format)
        try:
            self.stores.check_own()
        except StoreError as error:
            log.error("this worker takes no jobs: %s", error)
            raise SystemExit(STORE_EXIT_STATUS) from None
        if self.settings.models == ("*",):
            log.info("KVQ_MODELS is not set: this worker loads any model that a job names")
        with Sentry(
            stop=self._stop,
            force=self._force,
            look=self._look_at_job,
            parent=self.settings.parent,
        ):
            worked = super().work(*args, **kwargs)
        if self.exit_status:
            raise SystemExit(self.exit_status)
        return bool(worked)

    def _install_signal_handlers(self) -> None:
        Sentry.install_handlers()

    def _stop(self, why: str) -> None:
        log.info("stopping (%s); a running job ends after its chunk and goes back", why)
        self._stop_requested = True
        if (patience := getattr(self.connection, "patience", None)) is not None:
            patience.seconds = min(patience.seconds, _STOPPING_PATIENCE)
        if (control := self._control) is not None:
            control.stop(Cause.SHUTDOWN)

    def _force(self) -> None:
        try:
            if (lease := self._lease) is not None:
                lease.end("again")
            self.register_death()
        finally:
            _leave(0)

    def _look_at_job(self) -> None:
        control = self._control
        if control is not None and control.hung:
            log.critical("an evaluation has hung past timeout and grace: this worker ends itself")
            _leave(HUNG_EXIT_STATUS)

    # One job

    def get_heartbeat_ttl(self, job: Any, working_time: float = 0.0) -> int:
        """Seconds that a job stays this worker's without a sign of life."""
        return max(1, round(self.settings.lease))

    def execute_job(self, job: Any, queue: Any) -> None:
        """Run `job` on this thread, while others beat for it and watch over it."""
        try:
            self._execute(job, queue)
        except Exception:
            self.exit_status = FAILED_EXIT_STATUS
            raise
        finally:
            self._control = self._lease = None

    def _execute(self, job: Any, queue: Any) -> None:
        settings = self.settings
        timeout = min(job.timeout or settings.job_timeout, settings.job_timeout)
        control = Control(timeout=timeout, grace=settings.grace)
        execution = self.prepare_execution(job)
        self._lease = Lease(self, job, execution, seconds=settings.lease)
        self._control = control
        if self._stop_requested:
            control.stop(Cause.SHUTDOWN)
        token = CURRENT.set(
            Session(
                settings=settings,
                models=self.models,
                stores=self.stores,
                control=control,
                worker=self.name,
                fetch=self.connection.get,
            )
        )
        try:
            with Heartbeat(
                self._lease,
                control,
                interval=settings.heartbeat,
                register=self._register_again,
            ):
                self.perform_job(job, queue, execution)
        finally:
            CURRENT.reset(token)

    def _finalize_success(self, job: Any, queue: Any, execution: Any, return_value: Any) -> None:
        assert self._lease is not None
        if not self._lease.held():
            self._give_up(job, execution, "lost", Cause.LOST.value)
            return
        super()._finalize_success(job, queue, execution, return_value)
        # The result is written: whatever fails from here on is no reason to run the job again.
        try:
            logs.job_ended(job, self.name, return_value)
            queue.enqueue_dependents(job)
        except Exception:
            log.exception("%s is done; maintenance will release what waits for it", job.id)

    def _finalize_failure(self, job: Any, queue: Any, execution: Any, exc_info: Any) -> None:
        error = exc_info[1]
        cause = self._control.cause if self._control else None
        if cause is Cause.LOST:
            self._give_up(job, execution, "lost", str(error))
        elif isinstance(error, Stopped) and cause is Cause.SHUTDOWN:
            self._give_up(job, execution, "again", str(error))
        elif isinstance(error, Stopped) and cause is Cause.CANCELED:
            self._give_up(job, execution, "canceled", str(error))
            queue.enqueue_dependents(job)
        elif isinstance(error, StoreUnavailable):
            log.error("this worker takes no more jobs: %s", error)
            self._give_up(job, execution, "again", "its store cannot be written to")
            self.exit_status = STORE_EXIT_STATUS
            self._stop_requested = True
        else:
            if self._lease is not None:
                job.retries_left = self._lease.retries_left()
            super()._finalize_failure(job, queue, execution, exc_info)

    def _give_up(self, job: Any, execution: Any, how: str, why: str) -> None:
        assert self._lease is not None
        self._lease.end(how)
        self.executions.pop(execution.id, None)
        logs.job_given_up(job, self.name, how, why)

    def request_stop_execution(self, execution_id: str) -> None:
        """Stop a job at its next chunk, as RQ's own commands ask."""
        control = self._control
        if control is not None and execution_id in self.executions:
            control.stop(Cause.CANCELED)

    def serialize(self) -> dict[str, Any]:
        """RQ's facts of a worker, and with which kvq and on which store it works."""
        facts: dict[str, Any] = super().serialize()
        store = self.stores.own_id
        return {**facts, "kvq_version": version("kvq"), **({"kvq_store": store} if store else {})}

    def _register_again(self) -> None:
        self.connection.hset(self.key, mapping=self.serialize())
        self.set_state(WorkerStatus.BUSY)
        worker_registration.register(self)


def _leave(status: int) -> None:
    """End the process at once, even while the main thread is inside an evaluation."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
