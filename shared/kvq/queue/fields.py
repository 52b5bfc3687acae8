"""Checks of what comes out of Redis: each gives the value back or raises InvalidMessage."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvq.errors import InvalidMessage

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def only(source: Any, known: Sequence[str], what: str) -> Mapping[str, Any]:
    """`source` as an object with no other keys than `known`."""
    if not isinstance(source, dict) or not all(isinstance(key, str) for key in source):
        raise InvalidMessage(f"{what} is not a JSON object but {type(source).__name__}")
    if unknown := sorted(set(source) - set(known)):
        raise InvalidMessage(f"{what} has the unknown field {unknown[0][:60]!r}")
    return source


def string(source: Mapping[str, Any], name: str, longest: int, *, empty: bool = False) -> str:
    """A string of at most `longest` characters, none of them control characters."""
    value = source.get(name)
    if not isinstance(value, str):
        raise InvalidMessage(f"{name} is not a string but {type(value).__name__}")
    if len(value) > longest or (not value and not empty):
        raise InvalidMessage(
            f"{name} has {len(value)} characters; from 1 to {longest} are accepted"
        )
    if _CONTROL.search(value):
        raise InvalidMessage(f"{name} has control characters")
    return value


def maybe_string(source: Mapping[str, Any], name: str, longest: int) -> str | None:
    """The same, or None where the field is absent or null."""
    return None if source.get(name) is None else string(source, name, longest)


def choice(source: Mapping[str, Any], name: str, accepted: Sequence[str]) -> str:
    """One of the `accepted` strings."""
    value = source.get(name)
    if not isinstance(value, str) or value not in accepted:
        raise InvalidMessage(f"{name} is {str(value)[:60]!r}, not one of {', '.join(accepted)}")
    return value


def integer(source: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`; true and 1.0 are none."""
    value = source.get(name)
    if type(value) is not int or not low <= value <= high:
        raise InvalidMessage(f"{name} is {str(value)[:60]}, not a whole number {low} to {high}")
    return value


def maybe_integer(source: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """The same, or None where the field is absent or null."""
    return None if source.get(name) is None else integer(source, name, low, high)


def maybe_number(source: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A finite number above `low`, at most `high`, or None where it is absent or null."""
    value = source.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not low < value <= high:
        raise InvalidMessage(f"{name} is {str(value)[:60]}, not a number above {low:g}")
    return float(value)


def boolean(source: Mapping[str, Any], name: str) -> bool:
    """true or false; absent counts as false."""
    value = source.get(name, False)
    if type(value) is not bool:
        raise InvalidMessage(f"{name} is {str(value)[:60]!r}, not true or false")
    return value


def items(source: Mapping[str, Any], name: str, longest: int) -> list[Any]:
    """A list of at most `longest` entries; absent counts as empty."""
    value = source.get(name, [])
    if not isinstance(value, list):
        raise InvalidMessage(f"{name} is not a list but {type(value).__name__}")
    if len(value) > longest:
        raise InvalidMessage(f"{name} has {len(value)} entries; at most {longest} are accepted")
    return value


def strings(source: Mapping[str, Any], name: str, most: int, longest: int) -> tuple[str, ...]:
    """A list of at most `most` strings."""
    return tuple(string({name: one}, name, longest) for one in items(source, name, most))


def integers(
    source: Mapping[str, Any], name: str, most: int, low: int, high: int
) -> tuple[int, ...]:
    """A list of at most `most` whole numbers from `low` to `high`."""
    return tuple(integer({name: one}, name, low, high) for one in items(source, name, most))


def json_object(source: Mapping[str, Any], name: str, most_bytes: int) -> dict[str, Any]:
    """A JSON object that takes at most `most_bytes`; absent counts as empty."""
    value = source.get(name, {})
    if not isinstance(value, dict):
        raise InvalidMessage(f"{name} is not a JSON object but {type(value).__name__}")
    try:
        size = len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"{name} is not JSON: {error}") from None
    if size > most_bytes:
        raise InvalidMessage(f"{name} takes {size} bytes; at most {most_bytes} are accepted")
    return value
