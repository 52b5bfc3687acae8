"""Which names a cache may have: safe as a file name on every file system a store can live on."""

from __future__ import annotations

import re

from kvq.errors import InvalidName

#: Characters in the longest name.
MAX_NAME = 128

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OTHER = re.compile(r"[^A-Za-z0-9._-]")


def valid_name(name: str) -> bool:
    """True when `name` can name a cache: 1 to 128 of A-Z a-z 0-9 . _ -, a letter or digit first."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """`name` itself. Raises InvalidName, which says what to change."""
    if not isinstance(name, str):
        raise InvalidName(f"a cache name must be a string, not {type(name).__name__}")
    if valid_name(name):
        return name
    if not name:
        raise InvalidName("a cache name must not be empty")
    shown = repr(name if len(name) <= 60 else name[:57] + "...")
    if other := _OTHER.search(name):
        raise InvalidName(
            f"the cache name {shown} has the character {other[0]!r}: "
            "use letters (A-Z, a-z), digits, '.', '_' and '-' only"
        )
    if len(name) > MAX_NAME:
        raise InvalidName(
            f"the cache name {shown} has {len(name)} characters: use at most {MAX_NAME}"
        )
    raise InvalidName(f"the cache name {shown} must begin with a letter or a digit")


def file_key(name: str) -> str:
    """What two names share when a file system that ignores case would give them one file."""
    return name.lower()
