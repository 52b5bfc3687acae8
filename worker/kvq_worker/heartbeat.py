"""The thread that shows a running job to be alive. It never touches MLX."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from redis.exceptions import RedisError

from kvq_worker.control import Cause, Control
from kvq_worker.lease import Lease

log = logging.getLogger("rq.worker")


class Heartbeat:
    """Beats every `interval` seconds from entry to exit, and passes on what it hears.

    A lease that is gone and a cancel stop the job at its next chunk. `register` is called when
    Redis has forgotten the worker.
    """

    def __init__(
        self, lease: Lease, control: Control, *, interval: float, register: Callable[[], None]
    ) -> None:
        self._lease = lease
        self._control = control
        self._interval = interval
        self._register = register
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvq-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        # A beat that waits for Redis ends by itself, without harm: the lease is gone by then.
        self._thread.join(timeout=1)

    def _run(self) -> None:
        while True:
            try:
                self._beat()
            except (RedisError, OSError) as error:
                log.warning("heartbeat: %s", error)
            if self._over.wait(self._interval):
                return

    def _beat(self) -> None:
        held, canceled, forgotten = self._lease.beat(
            self._control.start, self._control.done, self._control.total
        )
        if self._over.is_set():
            return
        if not held:
            self._control.stop(Cause.LOST)
        elif canceled:
            self._control.stop(Cause.CANCELED)
        if forgotten:
            self._register()
