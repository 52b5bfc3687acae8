"""Timing several ways of doing one thing in one run, and printing them side by side."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each counted run of one way."""

    name: str
    seconds: Sequence[float]
    nbytes: int = 0
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(kw_only=True)
class Ways:
    """Ways of doing the same, run in turn (A B C A B C ...) so that drift hits all alike."""

    runs: int = 3
    _ways: dict[str, tuple[Callable[[], object], int, str]] = field(default_factory=dict)

    def add(self, name: str, way: Callable[[], object], nbytes: int = 0, note: str = "") -> None:
        self._ways[name] = way, nbytes, note

    def time(self) -> list[Timing]:
        """One warm-up of each, then the counted runs."""
        seconds: dict[str, list[float]] = {name: [] for name in self._ways}
        for number in range(self.runs + 1):
            for name, (way, _, _) in self._ways.items():
                began = time.perf_counter()
                result = way()
                took = time.perf_counter() - began
                del result
                mx.clear_cache()
                if number:
                    seconds[name].append(took)
        return [
            Timing(name=name, seconds=seconds[name], nbytes=nbytes, note=note)
            for name, (_, nbytes, note) in self._ways.items()
        ]


def show(title: str, timings: Sequence[Timing], *, against: str) -> None:
    """Print medians, spread, rates, and ratios to the way named `against`."""
    base = next(one.median for one in timings if one.name == against)
    table = Table(title=f"{title}\n{machine()}", title_justify="left", title_style="")
    for column in ("way", "median s", "min - max", "GB/s", f"x faster than {against}", "note"):
        table.add_column(column, justify="left" if column in ("way", "note") else "right")
    for one in timings:
        table.add_row(
            one.name,
            f"{one.median:.3f}",
            f"{min(one.seconds):.3f} - {max(one.seconds):.3f}",
            f"{one.nbytes / one.median / 1e9:.2f}" if one.nbytes else "",
            f"{base / one.median:.2f}",
            one.note,
        )
    Console(width=140).print(table)


def machine() -> str:
    """The machine and the versions that a figure belongs to."""
    device = mx.default_device()
    name = mx.device_info().get("device_name", "") if device.type == mx.gpu else ""
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"MLX {version('mlx')} on {device.type.name} {name}, mlx-lm {version('mlx-lm')}, "
        f"Python {platform.python_version()}"
    )


def drop_page_cache(folder: Path) -> None:
    """Ask the system to forget the pages of the files in `folder` (Linux; clean pages only)."""
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
