"""Which file system a folder is on, and whether one that should be mounted is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNTINFO = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One mounted file system."""

    point: Path
    kind: str
    options: str


def mount_of(path: Path, mountinfo: Path = _MOUNTINFO) -> Mount | None:
    """The file system that `path` is on; None where the system does not tell (macOS)."""
    real = path.resolve()
    best = None
    for mount in _mounts(mountinfo):
        inside = real == mount.point or mount.point in real.parents
        # Of two at one place the later one is on top.
        if inside and (best is None or len(mount.point.parts) >= len(best.point.parts)):
            best = mount
    return best


def empty_mount_point(path: Path, *, fstab: Path, platform: str) -> Path | None:
    """The place above `path` where something should be mounted and nothing is, if there is one.

    On Linux those that fstab names, on macOS the folders in /Volumes.
    """
    places = [path, *path.parents]
    if platform == "darwin":
        due = [one for one in places if one.parent == Path("/Volumes")]
    else:
        named = set(_fstab_points(fstab))
        due = [one for one in places if one in named]
    return next((one for one in due if one.is_dir() and not one.is_mount()), None)


def _mounts(mountinfo: Path) -> Iterator[Mount]:
    try:
        lines = mountinfo.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) >= 6 and len(right) >= 3:
            options = f"{left[5]},{right[2]}"
            yield Mount(point=Path(_unescaped(left[4])), kind=right[0], options=options)


def _fstab_points(fstab: Path) -> Iterator[Path]:
    try:
        lines = fstab.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split("#", 1)[0].split()
        if len(fields) >= 2 and fields[1].startswith("/") and fields[1] != "/":
            yield Path(_unescaped(fields[1]))


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
