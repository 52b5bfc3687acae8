"""Sizes and durations as people write them: `24G`, `512 MiB`, `7d`, `1h30m`."""

from __future__ import annotations

import math
import re

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_SIZES = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes in `text`: `1500`, `24G` (10**9), `24GiB` (2**30). Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is not a size such as 500M, 24G or 24GiB")
    unit = found[2].lower()
    return int(float(found[1]) * (_BINARY_SIZES[unit] if found[3] else _SIZES[unit]))


def parse_seconds(text: str) -> float:
    """Seconds in `text`: `90`, `2.5`, `10m`, `7d`, `1h30m`. Raises ValueError."""
    cleaned = text.strip()
    try:
        seconds = float(cleaned)
    except ValueError:
        parts = list(_PART.finditer(cleaned))
        if not parts or "".join(part[0] for part in parts) != cleaned.replace(" ", ""):
            raise ValueError(f"{text!r} is not a duration such as 90, 10m, 7d or 1h30m") from None
        seconds = sum(float(part[1]) * _SECONDS[part[2].lower()] for part in parts)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{text!r} is not a duration of zero or more seconds")
    return seconds


def format_bytes(count: float) -> str:
    """`count` bytes in decimal units, three figures: `1.23 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{_three_figures(count)} {unit}"
        count /= 1000
    return f"{_three_figures(count)} TB"


def format_seconds(seconds: float) -> str:
    """`seconds` for people: `12 ms`, `3.4 s`, `2 m 05 s`, `3 h 10 m`, `2 d 4 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _three_figures(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
