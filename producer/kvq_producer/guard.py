"""Child processes that do not outlive this one, even when it is killed outright.

A small shell stands between: it runs the child and a reader of a pipe whose other end only this
process holds. When this process ends, in whatever way, the pipe closes and the child is told to
end too. The same on Linux and macOS.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_SHELL = """
exec 3<&0 </dev/null
"$@" 3<&- &
child=$!
( while read -r line; do :; done; kill -TERM "$child" ) <&3 >/dev/null 2>&1 &
reader=$!
exec 3<&-
trap ':' INT TERM HUP
while :; do
  wait "$child"
  status=$?
  kill -0 "$child" 2>/dev/null || break
done
kill "$reader" 2>/dev/null
exit "$status"
"""


class GuardedProcess:
    """`command`, started at once in a session of its own; its output goes to `log`."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        with _opened(log) as output:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL, "kvq-guard", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment) if environment is not None else None,
                start_new_session=True,
            )
        self.log = log

    def poll(self) -> int | None:
        """Exit status of the child, None while it runs."""
        status = self._shell.poll()
        if status is not None:
            self._let_go()
        return status

    def stop(self, seconds: float) -> int:
        """Tell the child to end (SIGTERM), kill it after `seconds`; returns its exit status."""
        self._let_go()
        try:
            return self._shell.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._shell.wait()

    def kill(self) -> None:
        """End the child and its guard at once (SIGKILL)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)

    def _let_go(self) -> None:
        with contextlib.suppress(OSError):
            assert self._shell.stdin is not None
            self._shell.stdin.close()

    def last_lines(self, count: int = 20) -> str:
        """The end of the child's output."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""


def _opened(log: Path) -> IO[bytes]:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "ab")
