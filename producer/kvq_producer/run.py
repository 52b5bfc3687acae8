"""Prefills a file of prompts on this machine: embedded server, workers, and what keeps them going.

The parts are those of a fleet; only they all run here, and end with the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import FrameType

import click

from kvq.errors import BatchNotFound, KvqError, StoreUnavailable
from kvq.queue.connection import queue_errors
from kvq.queue.results import PromptResult, State
from kvq.settings import Settings
from kvq.store.store import Store
from kvq_producer.submit.intake import Intake
from kvq_producer.submit.jobs import Work
from kvq_producer.submit.send import send
from kvq_producer.submit.wish import Wish
from kvq_producer.valkey import EmbeddedServer
from kvq_producer.waiting import wait_for

#: Exit status of a worker that cannot use its store.
_STORE_EXIT_STATUS = 75
#: How often one of the workers may die before the run gives up.
_DEATHS = 5
#: How often a batch is sent again because its server died.
_LOSSES = 4
#: How long (seconds) a worker may take to end its chunk.
_STOP_SECONDS = 120.0


class Workers:
    """Worker processes of one run, restarted when they die. Use it as a context manager."""

    def __init__(self, count: int, environment: dict[str, str], folder: Path) -> None:
        from kvq_worker.environment import worker_command

        self._environment = environment
        self._command = worker_command(environment)
        self._logs = [folder / f"worker-{number}.log" for number in range(1, count + 1)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._deaths = 0

    def __enter__(self) -> Workers:
        for log in self._logs:
            log.unlink(missing_ok=True)
            self._processes.append(self._start(log))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def look(self) -> None:
        """Restart workers that died. Raises StoreUnavailable, or KvqError when they keep dying."""
        for place, process in enumerate(self._processes):
            status = process.poll()
            if status is None:
                continue
            said = self._last_words(self._logs[place])
            if status == _STORE_EXIT_STATUS:
                raise StoreUnavailable(f"the worker takes no more jobs. Its last words:\n{said}")
            self._deaths += 1
            if self._deaths > _DEATHS:
                raise KvqError(
                    f"workers died {self._deaths} times, the last with exit status {status}; run "
                    f"again to continue. Its log is {self._logs[place]}; its last words:\n{said}"
                )
            self._processes[place] = self._start(self._logs[place])

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
            # A session of its own: Ctrl-C is for this command, which tells the worker to stop.
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    @staticmethod
    def _last_words(log: Path) -> str:
        lines = log.read_text(errors="replace").splitlines()[-8:]
        return "\n".join(f"  {line[:300]}" for line in lines)


def run_batch(
    intake: Intake, wish: Wish, store: Store, settings: Settings, *, workers: int
) -> list[PromptResult]:
    """What became of each prompt of `intake`, in the order of the file.

    Starts nothing when everything is stored. Ends its processes whatever happens; what is finished
    is stored, and another run goes on from there.
    """
    if not intake.plan.jobs:
        return _stored_already(intake, wish)
    folder = settings.state / "run" / _folder_name(store)
    with EmbeddedServer(folder) as server, queue_errors(server.url):
        connection = server.client(patience=2.0)
        environment = _worker_environment(server.url, store, settings, intake)
        if wish.export is not None:
            environment["KVQ_EXPORT"] = wish.export
        with Workers(workers, environment, folder) as running:

            def look() -> None:
                server.revive()
                running.look()

            for losses in range(_LOSSES):
                batch = send(connection, intake, wish, settings).batch
                wait_for(connection, batch, before_look=look)
                # A server that died has forgotten its last second; the same work is sent again.
                try:
                    results = list(batch.results())
                except BatchNotFound:
                    if losses == _LOSSES - 1:
                        raise
                else:
                    if not any(one.state is State.LOST for one in results):
                        break
        return results


def _stored_already(intake: Intake, wish: Wish) -> list[PromptResult]:
    prompts, _ = Work(intake=intake, wish=wish, batch="").entries()
    return [
        PromptResult(
            custom_id=one.custom_id or "",
            state=State.STORED,
            name=one.name,
            facts=one.facts or {},
        )
        for one in prompts
    ]


def _worker_environment(
    url: str, store: Store, settings: Settings, intake: Intake
) -> dict[str, str]:
    from kvq_worker.environment import worker_environment

    groups = [one.group for one in intake.plan.groups]
    models = {name for one in groups for name in (one.model, one.adapter)}
    return worker_environment(
        {
            **os.environ,
            "KVQ_REDIS_URL": url,
            "KVQ_QUEUE": settings.queue,
            "KVQ_STORE": str(store.path),
            "KVQ_MODELS": ",".join(sorted(_as_glob(one) for one in models if one)),
            "KVQ_PARENT": str(os.getpid()),
        }
    )


def _as_glob(name: str) -> str:
    """A pattern that admits `name` and nothing else; a comma would part it in two."""
    special = "".join(f"[{c}]" if c in "*?[" else c for c in name)
    return special.replace(",", "?")


def _folder_name(store: Store) -> str:
    return f"{store.path.name}-{blake2b(str(store.path).encode(), digest_size=5).hexdigest()}"


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what it started ends too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    kinds = (signal.SIGTERM, signal.SIGHUP)
    old = [signal.signal(kind, interrupt) for kind in kinds]
    try:
        yield
    except KeyboardInterrupt:
        click.echo("kvq: stopped; run the same command again to continue", err=True)
        raise
    finally:
        for kind, handler in zip(kinds, old, strict=True):
            signal.signal(kind, handler)
