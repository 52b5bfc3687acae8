"""What one check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How bad it is. Only what is broken makes the command fail."""

    OK = "ok"
    #: Worth knowing; nothing need be done.
    NOTE = "note"
    #: Works, and will fail or be slow some day.
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A check's name, the state, what was found, and what to do about it (one line each)."""

    check: str
    state: State
    message: str
    mend: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finding before it has its check's name."""

    state: State
    message: str
    mend: str = ""


def fine(message: str) -> Result:
    return Result(state=State.OK, message=message)


def note(message: str, mend: str = "") -> Result:
    return Result(state=State.NOTE, message=message, mend=mend)


def warning(message: str, mend: str) -> Result:
    return Result(state=State.WARNING, message=message, mend=mend)


def broken(message: str, mend: str) -> Result:
    return Result(state=State.BROKEN, message=message, mend=mend)
