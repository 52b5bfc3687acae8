"""A line on the terminal that counts while something takes longer than a moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.status import Status

from kvq_producer.output import console

#: Seconds before the line appears, and between two changes of it.
_PATIENCE, _PAUSE = 1.0, 0.2


@contextmanager
def counting() -> Iterator[Callable[[str], None]]:
    """A function that shows a text; nothing is shown where standard error is no terminal."""
    screen = console(error=True)
    if not screen.is_terminal:
        yield lambda text: None
        return
    status: Status | None = None
    due = time.monotonic() + _PATIENCE

    def show(text: str) -> None:
        nonlocal status, due
        if time.monotonic() < due:
            return
        due = time.monotonic() + _PAUSE
        if status is None:
            status = Status(text, console=screen)
            status.start()
        else:
            status.update(text)

    try:
        yield show
    finally:
        if status is not None:
            status.stop()
