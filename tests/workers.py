"""Worker processes for tests: started as anybody would, killed in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from servers import Server

from kvq.store.store import Store

TESTS = Path(__file__).parent
STAND_IN = "standin.StandInWorker"
RESIDENT = "kvq_worker.ResidentWorker"


def clean_environment() -> dict[str, str]:
    """This process's variables without what steers kvq, RQ and Redis."""
    ours = ("KVQ_", "RQ_", "REDIS_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def environment(url: str, worker_class: str | None = STAND_IN, **variables: str) -> dict[str, str]:
    """What makes a plain `rq worker kvq` kvq's own; without a class, RQ's."""
    ours = {
        "RQ_REDIS_URL": url,
        "RQ_JOB_CLASS": "kvq_worker.KvqJob",
        "RQ_CONNECTION_CLASS": "kvq.queue.connection.PatientRedis",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "",
        "PYTHONUNBUFFERED": "1",
    }
    if worker_class is not None:
        ours["RQ_WORKER_CLASS"] = worker_class
    return {**clean_environment(), **ours, **variables}


class WorkerProcess:
    """`rq worker kvq` in a process of its own; its output is in `log`."""

    def __init__(self, log: Path, environment: dict[str, str], *options: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rq.cli", "worker", "kvq", *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=log.parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float = 30) -> int:
        """Its exit status."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the worker did not end:\n{self.output[-3000:]}") from None


class Fleet:
    """Starts workers of one server and store, and ends those that are left."""

    def __init__(self, folder: Path, server: Server, store: Store) -> None:
        self._folder = folder
        self._server = server
        self._store = store
        self.workers: list[WorkerProcess] = []

    def start(
        self, *options: str, worker_class: str | None = STAND_IN, **variables: str
    ) -> WorkerProcess:
        given = {"KVQ_STORE": str(self._store.path), **variables}
        log = self._folder / f"worker-{len(self.workers)}.log"
        env = environment(self._server.url, worker_class, **given)
        self.workers.append(WorkerProcess(log, env, *options))
        return self.workers[-1]

    def ready(self, worker: WorkerProcess) -> WorkerProcess:
        eventually(lambda: "Listening on" in worker.output or not worker.alive, 60, worker.output)
        return worker


def eventually(condition: Callable[[], object], seconds: float = 30, what: str = "") -> float:
    """Wait until `condition()` holds; returns how long it took, fails after `seconds`."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if condition():
            return time.monotonic() - started
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what or condition}")
