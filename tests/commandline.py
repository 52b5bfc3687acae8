"""The `kvq` command in a process of its own, as people run it, with everything in one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvq_worker.environment import openblas, openblas_kernels

#: Variables of the machine that would change what a command does.
_OURS = ("KVQ_", "RQ_", "REDIS_", "HF_")


class CommandLine:
    """Runs `kvq` with its state in `folder` and nothing of the caller's settings."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        kept = {key: one for key, one in os.environ.items() if not key.startswith(_OURS)}
        self.environment = {
            **kept,
            **_fast_blas(),
            # The interpreter's `kvq` and `python` come before others of these names.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "KVQ_STATE": str(folder / "state"),
            "KVQ_CACHE_DIR": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            **variables,
        }

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "kvq_producer", *map(str, arguments)]

    def __call__(
        self, *arguments: object, stdin: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env={**self.environment, **variables},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=self.folder,
        )

    def start(self, *arguments: object, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            env={**self.environment, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
        )

    def children(self, of: int, word: str) -> list[int]:
        """Process ids of the children of `of` whose command line has `word` in it."""
        shown = subprocess.run(
            ["ps", "-eww", "-o", "pid=,ppid=,command="], capture_output=True, text=True
        ).stdout
        rows = (line.split(None, 2) for line in shown.splitlines())
        return [int(pid) for pid, parent, command in rows if int(parent) == of and word in command]


def _fast_blas() -> dict[str, str]:
    library, kernels = openblas(), openblas_kernels()
    chosen = {"LD_PRELOAD": library, "OPENBLAS_CORETYPE": kernels if library else None}
    return {name: value for name, value in chosen.items() if value}


def write_lines(path: Path, *lines: dict[str, Any] | str | bytes) -> Path:
    """A prompts file; what is not a dict goes in as it stands."""
    with path.open("wb") as file:
        for one in lines:
            data = json.dumps(one) if isinstance(one, dict) else one
            file.write((data if isinstance(data, bytes) else data.encode()) + b"\n")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def bodies(path: Path) -> list[dict[str, Any]]:
    """What a results file says of each stored prompt; fails where one is not stored."""
    lines = read_lines(path)
    assert [one["error"] for one in lines] == [None] * len(lines)
    return [one["response"]["body"] for one in lines]
