"""Waits for a batch, with a progress bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import RedisError
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from kvq.queue import keys
from kvq.queue.batch import Batch
from kvq.queue.progress import Progress as BatchProgress
from kvq.queue.progress import Watch
from kvq.queue.results import State
from kvq.units import format_seconds
from kvq_producer.output import console

#: Pauses (seconds) between two looks; with a large batch a look takes longer, and so the pause.
_SHORTEST, _LONGEST = 0.1, 5.0


class TimeLeft(ProgressColumn):
    """An estimate from the tokens done since the waiting began."""

    def render(self, task: Task) -> Text:
        """`3 m 20 s left`, or nothing while there is too little to go by."""
        gained = task.completed - float(task.fields.get("at_start", 0))
        if not task.total or not gained or task.elapsed is None or task.elapsed < 2:
            return Text("")
        seconds = (task.total - task.completed) * task.elapsed / gained
        return Text(f"{format_seconds(seconds)} left")


def wait_for(
    connection: Any,
    batch: Batch,
    *,
    timeout: float | None = None,
    before_look: Callable[[], None] | None = None,
) -> BatchProgress:
    """The batch's progress when it is over, or after `timeout` seconds.

    `before_look` is called before each look, again when one finds no server, and may raise to end
    the waiting. Without it, redis errors are raised when the connection's patience ends.
    """
    watch = Watch(connection, batch)
    deadline = None if timeout is None else time.monotonic() + timeout
    with _bars(batch) as show:
        while True:
            if before_look is not None:
                before_look()
            began = time.monotonic()
            try:
                progress = watch.poll()
                idle = before_look is None and not progress.over and _no_worker(connection, batch)
            except (RedisError, OSError):
                if before_look is None:
                    raise
                time.sleep(_SHORTEST)
                continue
            show(progress, idle)
            if progress.over or (deadline is not None and time.monotonic() >= deadline):
                return progress
            took = time.monotonic() - began
            pause = min(_LONGEST, max(_SHORTEST, 4 * took))
            if deadline is not None:
                pause = min(pause, max(0.0, deadline - time.monotonic()))
            time.sleep(pause)


def _no_worker(connection: Any, batch: Batch) -> bool:
    return not connection.scard(f"{keys.WORKERS}:{batch.facts.queue}")


@contextmanager
def _bars(batch: Batch) -> Iterator[Callable[[BatchProgress, bool], None]]:
    screen = console(error=True)
    if not screen.is_terminal:
        told = False

        def tell(progress: BatchProgress, idle: bool) -> None:
            nonlocal told
            if idle and not told:
                screen.print(_no_worker_text(batch))
                told = True

        yield tell
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeLeft(),
        TextColumn("[yellow]{task.fields[note]}"),
        console=screen,
        transient=True,
    ) as bars:
        prompts = bars.add_task("prompts", counts="", note="")
        tokens = bars.add_task("tokens ", counts="", note="", at_start=None)

        def show(progress: BatchProgress, idle: bool) -> None:
            failed = progress.finished - progress.states[State.STORED]
            text = f"{progress.finished:,}/{progress.prompts:,}"
            bars.update(
                prompts,
                completed=progress.finished,
                total=progress.prompts,
                counts=text + (f", [red]{failed:,} not stored[/]" if failed else ""),
                note=_no_worker_text(batch) if idle else "",
            )
            if bars.tasks[tokens].fields["at_start"] is None:
                bars.update(tokens, at_start=progress.done_tokens)
            bars.update(
                tokens,
                completed=progress.done_tokens,
                total=progress.work_tokens,
                counts=f"{progress.done_tokens:,}/{progress.work_tokens:,}",
            )

        yield show


def _no_worker_text(batch: Batch) -> str:
    return f"no worker listens on the queue {batch.facts.queue!r}: start one with `kvq worker`"
