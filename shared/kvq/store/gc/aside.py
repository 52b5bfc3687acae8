"""Moving files out of their names before they are removed, so that a late touch is still seen."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvq.store.census import ASIDE_PREFIX
from kvq.store.disk import move_to_free_name

#: A file aside for longer than this (seconds) belongs to a sweep that was killed.
ABANDONED = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Aside:
    """A file that was called `path` and is now at `place`."""

    path: Path
    place: Path

    @classmethod
    def left_at(cls, place: Path) -> Aside:
        """What another sweep has moved to `place`."""
        return cls(path=place.with_name(original_name(place.name)), place=place)

    def touched_since(self, cutoff: float) -> bool:
        """Whether someone relies on it: it was touched at `cutoff` or later. Raises OSError."""
        return self.place.stat().st_mtime >= cutoff

    def put_back(self) -> None:
        """Give it its name again, unless a writer has made that file anew. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):  # another sweep has put it back
            try:
                move_to_free_name(self.place, self.path)
            except FileExistsError:
                os.unlink(self.place)

    def remove(self) -> bool:
        """Remove it for good; False when another sweep was first. Raises OSError."""
        try:
            os.unlink(self.place)
        except FileNotFoundError:
            return False
        return True


def original_name(name: str) -> str:
    """The name that a file aside had."""
    return name.removeprefix(ASIDE_PREFIX).partition("-")[2]


def move_aside(path: Path) -> Aside | None:
    """Move a file out of its name; None when it is not there. Raises OSError."""
    place = path.with_name(f"{ASIDE_PREFIX}{secrets.token_hex(4)}-{path.name}")
    try:
        os.rename(path, place)
    except FileNotFoundError:
        return None
    return Aside(path=path, place=place)
