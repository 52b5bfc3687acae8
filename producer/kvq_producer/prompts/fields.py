"""The optional fields of a line, each checked by its own rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvq.errors import UsageError
from kvq.model.messages import kind_of
from kvq.store.names import check_name
from kvq.units import parse_seconds

CODECS = ("raw", "q8", "q4", "auto")
MAX_ID = 512
MAX_PRIORITY = 1000

_MAX_TTL = 100 * 365 * 86400.0


def check_fields(line: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields that `line` gives, by the names of `Prompt`, and what is wrong with the others.

    A field that is null counts as not given.
    """
    found: dict[str, Any] = {}
    reasons = []
    for name, check in _CHECKS.items():
        if (value := line.get(name)) is not None:
            try:
                found[name] = check(value)
            except UsageError as error:
                reasons.append(str(error))
    return found, reasons


def _custom_id(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        raise UsageError(f'custom_id must be a string: write "{str(value)[:20]}" in quotes')
    if not isinstance(value, str):
        raise UsageError(f"custom_id must be a string, not {kind_of(value)}")
    if not value:
        raise UsageError("custom_id is empty: give one or leave it out")
    if len(value) > MAX_ID:
        raise UsageError(f"custom_id has {len(value)} characters: use at most {MAX_ID}")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"name must be a string, not {kind_of(value)}")
    return check_name(value)


def _model(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"model must be a string, not {kind_of(value)}")
    if not value.strip() or "\0" in value:
        raise UsageError("model is empty: give a folder or a hub id, or leave it out")
    return value


def _ttl(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(f'ttl must be seconds or such as "7d" or "12h", not {kind_of(value)}')
    try:
        seconds = parse_seconds(value) if isinstance(value, str) else float(value)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"ttl: {str(error)[:200]}") from error
    if seconds <= 0:
        raise UsageError("ttl must be more than 0: leave it out to keep the cache")
    if seconds > _MAX_TTL:
        raise UsageError("ttl is more than 100 years: leave it out to keep the cache")
    return seconds


def _pin(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"pin must be true or false, not {kind_of(value)}")
    return value


def _codec(value: Any) -> str:
    if not isinstance(value, str) or value not in CODECS:
        shown = f"{value[:40]!r}" if isinstance(value, str) else kind_of(value)
        raise UsageError(f"codec must be one of {', '.join(CODECS)}, not {shown}")
    return value


def _priority(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"priority must be an integer, not {kind_of(value)}")
    if abs(value) > MAX_PRIORITY:
        raise UsageError(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return value


def _metadata(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"metadata must be an object, not {kind_of(value)}")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "custom_id": _custom_id,
    "name": _name,
    "model": _model,
    "ttl": _ttl,
    "pin": _pin,
    "codec": _codec,
    "priority": _priority,
    "metadata": _metadata,
}

#: Names of the optional fields.
FIELDS = tuple(_CHECKS)
