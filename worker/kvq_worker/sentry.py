"""The thread that acts while the main one computes: signals, a parent's death, a hung evaluation.

Python runs signal handlers on the main thread between two bytecodes, and an evaluation in MLX can
take minutes of one. A wakeup descriptor gets the signal here at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

log = logging.getLogger("rq.worker")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Two signals closer together than this (seconds) count once: a terminal and a supervisor may both
#: send theirs for one wish.
_ONCE = 0.5
_LOOK = 0.5


class Sentry:
    """Watches from entry to exit; enter and leave it on the main thread.

    `stop` is called for the first SIGTERM or SIGINT and when process `parent` dies, `force` for the
    second signal, and `look` twice a second.
    """

    def __init__(
        self,
        *,
        stop: Callable[[str], None],
        force: Callable[[], None],
        look: Callable[[], None],
        parent: int | None = None,
    ) -> None:
        self._stop = stop
        self._force = force
        self._look = look
        self._parent = parent
        self._asked_at: float | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="kvq-sentry", daemon=True)

    def __enter__(self) -> Sentry:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        signal.set_wakeup_fd(self._old_wakeup)
        os.write(self._write, b"\0")
        self._thread.join(timeout=5)
        os.close(self._read)
        os.close(self._write)

    @staticmethod
    def install_handlers() -> None:
        """Have SIGTERM and SIGINT arrive here instead of ending the process."""
        for one in _SIGNALS:
            signal.signal(one, _leave_it_to_the_thread)

    def _run(self) -> None:
        while not self._over:
            ready, _, _ = select.select([self._read], [], [], _LOOK)
            for number in os.read(self._read, 64) if ready else b"":
                if number in _SIGNALS:
                    self._on_signal(signal.Signals(number).name)
            if self._parent is not None and os.getppid() != self._parent:
                self._parent = None
                self._stop("the process that started it has ended")
            with contextlib.suppress(OSError):
                self._look()

    def _on_signal(self, name: str) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._stop(name)
        elif now - self._asked_at >= _ONCE:
            log.warning("%s again: ending at once", name)
            self._force()


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    pass
