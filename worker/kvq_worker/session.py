"""What a worker lends its job while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from kvq.settings import Settings
from kvq_worker.control import Control
from kvq_worker.models import Models
from kvq_worker.storage import Stores

log = logging.getLogger("rq.worker")

_HINT = (
    "kvq: this RQ worker loads the model anew for every job and cannot be stopped between chunks. "
    "Start it with `kvq worker`, or with RQ_WORKER_CLASS=kvq_worker.ResidentWorker."
)


@dataclass(frozen=True, kw_only=True)
class Session:
    """`fetch` gets bytes from Redis by key; `worker` is the worker's name."""

    settings: Settings
    models: Models
    stores: Stores
    control: Control
    worker: str
    fetch: Callable[[str], bytes | None]


#: The session of the job that runs, set by ResidentWorker.
CURRENT: ContextVar[Session | None] = ContextVar("kvq_session", default=None)


def current_session() -> Session:
    """The session of the running job; one made for it when the worker is not kvq's own."""
    return CURRENT.get() or _foreign_session()


def _foreign_session() -> Session:
    from rq import get_current_job

    job = get_current_job()
    if job is None:
        raise RuntimeError("prefill runs as a job of an RQ worker")
    settings = Settings.from_env()
    worker = job.worker_name or "an RQ worker"
    # A forking worker has a new process for each job, so Redis remembers what was said.
    if job.connection.set(f"kvq:hinted:{worker}", 1, nx=True, ex=86400):
        log.warning(_HINT)
    return Session(
        settings=settings,
        models=Models(settings),
        stores=Stores(settings),
        # RQ ends such a job itself, by a signal at its timeout.
        control=Control(timeout=settings.job_timeout, grace=settings.grace),
        worker=worker,
        fetch=job.connection.get,
    )
