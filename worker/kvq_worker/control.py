"""A running job as the threads around it see it: how far it is, and whether it should stop."""

from __future__ import annotations

import threading
import time
from enum import StrEnum

from kvq.errors import Stopped


class Cause(StrEnum):
    """Why a job is to stop. The text is what people read."""

    SHUTDOWN = "the worker was told to stop"
    CANCELED = "it was canceled"
    LOST = "another worker has taken it over"
    TIMEOUT = "it ran longer than its timeout"


class Control:
    """Shared by the thread that computes, which calls `on_chunk`, and those that watch it.

    `timeout` and `grace` are seconds from now.
    """

    def __init__(self, *, timeout: float, grace: float) -> None:
        self._lock = threading.Lock()
        self._cause: Cause | None = None
        self._deadline = time.monotonic() + timeout
        self._grace = grace
        self.done = 0
        self.total = 0
        #: Tokens that were stored when the job began; None until that is known.
        self.start: int | None = None

    @property
    def cause(self) -> Cause | None:
        """Why the job is to stop, None while it may go on."""
        return self._cause

    @property
    def hung(self) -> bool:
        """Whether it is past its timeout and the grace, so that no chunk will end any more."""
        return time.monotonic() > self._deadline + self._grace

    def stop(self, cause: Cause) -> None:
        """Ask the job to stop at its next chunk. The first cause counts, LOST before all others."""
        with self._lock:
            if self._cause is None or cause is Cause.LOST:
                self._cause = cause

    def on_chunk(self, done: int, total: int) -> None:
        """Note `done` of `total` tokens; raises Stopped when the job is to stop."""
        self.done, self.total = done, total
        if self.start is None:
            self.start = done
        self.check()

    def check(self) -> None:
        """Raise Stopped when the job is to stop."""
        if time.monotonic() > self._deadline:
            self.stop(Cause.TIMEOUT)
        if self._cause is not None:
            raise Stopped(self._cause.value, self.done)
