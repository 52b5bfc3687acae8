"""A real server for tests, which can be killed and come back with what was on its disk."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from kvq.queue.connection import PatientRedis
from kvq.queue.patience import Patience
from kvq_producer.valkey import find_server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server on a free port of 127.0.0.1, data in `folder`, every write appended to a file."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [find_server(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "yes", "--dir", str(self.folder), *self._options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        address, deadline = ("127.0.0.1", self.port), time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
                return self
            time.sleep(0.02)
        raise TimeoutError((self.folder / "log").read_text())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it without any chance to save."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wipe(self) -> None:
        """Forget what is on disk; call while it is dead."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    def client(self, patience: float = 10.0) -> PatientRedis:
        return PatientRedis.from_url(self.url, retry=Patience(patience))

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
