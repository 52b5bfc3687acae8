"""Parsers of settings and options: text in, value out, ValueError saying what is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvq.units import parse_bytes, parse_seconds

_QUEUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_PASSWORD = re.compile(r"(?P<head>^[a-z+]+://[^/@:]*:)(?P<secret>.*)(?P<tail>@)", re.IGNORECASE)
_QUERY_PASSWORD = re.compile(r"(?P<head>[?&][a-z_]*password=)[^&]*", re.IGNORECASE)


def text(raw: str) -> str:
    """`raw` without surrounding blanks."""
    return raw.strip()


def path(raw: str) -> Path:
    """An absolute path; `~` is the home folder."""
    return Path(raw.strip()).expanduser().absolute()


def queue(raw: str) -> str:
    """A queue name."""
    if not _QUEUE.fullmatch(raw.strip()):
        raise ValueError(
            f"{raw!r} is not a queue name: letters, digits, '_', '-' and '.', at most 64"
        )
    return raw.strip()


def globs(raw: str) -> tuple[str, ...]:
    """Comma-separated patterns, at least one."""
    patterns = tuple(part.strip() for part in raw.split(",") if part.strip())
    if not patterns:
        raise ValueError(f"{raw!r} names nothing: give names or globs, comma-separated")
    return patterns


def choice(*accepted: str) -> Callable[[str], str]:
    """Parser of one of the `accepted` words."""

    def parse(raw: str) -> str:
        if raw.strip() not in accepted:
            raise ValueError(f"{raw!r} is not one of {', '.join(accepted)}")
        return raw.strip()

    return parse


def integer(low: int, high: int) -> Callable[[str], int]:
    """Parser of whole numbers from `low` to `high`."""

    def parse(raw: str) -> int:
        try:
            value = int(raw.strip())
        except ValueError:
            raise ValueError(f"{raw!r} is not a whole number from {low} to {high}") from None
        if not low <= value <= high:
            raise ValueError(f"{raw!r} is not from {low} to {high}")
        return value

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Parser of durations from `low` to `high` seconds."""

    def parse(raw: str) -> float:
        value = parse_seconds(raw)
        if not low <= value <= high:
            raise ValueError(f"{raw!r} is not from {low:g} to {high:g} seconds")
        return value

    return parse


def size(low: int) -> Callable[[str], int]:
    """Parser of sizes of at least `low` bytes."""

    def parse(raw: str) -> int:
        value = parse_bytes(raw)
        if value < low:
            raise ValueError(f"{raw!r} is below {low} bytes")
        return value

    return parse


def masked_url(url: str) -> str:
    """`url` with its passwords as ***, to be shown."""
    hidden = _PASSWORD.sub(r"\g<head>***\g<tail>", url)
    return _QUERY_PASSWORD.sub(r"\g<head>***", hidden)
