"""Building a folder once and whole: beside its place first, then renamed into it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvq.errors import UsageError

#: Written last into a finished folder: what it was made from, and the size of each file in bytes.
STAMP = "kvq-demo.json"


def is_complete(folder: Path, made_from: dict[str, Any]) -> bool:
    """Whether `folder` was made from exactly `made_from`, and each of its files has its size.

    Reads one small file and looks at the sizes of the others.
    """
    stamp = _read_stamp(folder)
    if stamp is None or stamp.get("made_from") != made_from:
        return False
    sizes = stamp.get("bytes")
    return isinstance(sizes, dict) and sizes.items() <= _sizes(folder).items()


def build_once(folder: Path, made_from: dict[str, Any], build: Callable[[Path], None]) -> bool:
    """Make `folder` with `build(empty_folder)` unless it is complete; return whether it was built.

    Until the last moment `folder` is what it was before: absent, or an older build, which is then
    replaced. What an interrupted build left behind is removed by the next one. Callers at the same
    time wait for each other. Raises UsageError when a folder that is not ours is in the place.
    """
    folder = folder.absolute()
    if is_complete(folder, made_from):
        return False
    _refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if is_complete(folder, made_from):  # another process has just finished it
            return False
        building = folder.with_name(f".{folder.name}.building")
        replaced = folder.with_name(f".{folder.name}.replaced")
        for left_behind in (building, replaced):
            shutil.rmtree(left_behind, ignore_errors=True)
        try:
            building.mkdir()
            build(building)
            stamp = {"made_from": made_from, "bytes": _sizes(building)}
            (building / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
            _flush(building)
            if folder.exists():
                folder.rename(replaced)
            building.rename(folder)
        finally:
            for left_behind in (building, replaced):
                shutil.rmtree(left_behind, ignore_errors=True)
    return True


def _read_stamp(folder: Path) -> dict[str, Any] | None:
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != STAMP
    }


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists() or _read_stamp(folder) is not None:
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UsageError(f"{folder} exists and was not made by this command; choose another place")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`'s place. The lock file stays: removing it would race."""
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _flush(folder: Path) -> None:
    # The stamp must not outlive, after a power cut, the files that it vouches for.
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
