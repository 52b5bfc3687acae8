"""Lines of a binary stream, read in bounded memory, and the JSON value that each holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from kvq.errors import UsageError

#: Bytes in the longest line accepted, unless the caller says otherwise.
MAX_LINE = 16 << 20
#: Levels of lists and objects inside each other.
MAX_DEPTH = 100

#: First bytes of files that are no UTF-8 text, and what to do about them.
FOREIGN = {
    b"\xff\xfe": "is UTF-16: save the file as UTF-8",
    b"\xfe\xff": "is UTF-16: save the file as UTF-8",
    b"\x1f\x8b": "is compressed: unpack the file first (gzip -d)",
    b"PK\x03\x04": "is compressed: unpack the file first",
    b"\x28\xb5\x2f\xfd": "is compressed: unpack the file first (zstd -d)",
}
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_lines(
    stream: BinaryIO, source: str, max_line: int = MAX_LINE
) -> Iterator[tuple[int, bytes | UsageError]]:
    """(number from 1, content without its end) of each line that is not blank.

    A line over `max_line` bytes is skipped in pieces and given as an error, and so is the first
    line of a stream that is no text, which is not read on. Raises UsageError when reading fails.
    """
    number = 0
    try:
        while line := stream.readline(max_line + 2):
            number += 1
            if number == 1:
                for magic, reason in FOREIGN.items():
                    if line.startswith(magic):
                        yield 1, UsageError(f"this {reason}")
                        return
            content = line.removeprefix(_BOM).rstrip(b"\r\n")
            if len(content) > max_line or (len(line) > max_line + 1 and not line.endswith(b"\n")):
                while line and not line.endswith(b"\n"):
                    line = stream.readline(1 << 20)
                yield number, UsageError(f"longer than {max_line} bytes, the limit of a line")
            elif content.strip():
                yield number, content
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror or error}") from error


def decode_line(line: bytes) -> Any:
    """The JSON value in `line`. Raises UsageError, whose message says where and why not."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"invalid UTF-8 at byte {error.start + 1} (0x{line[error.start]:02x}): "
            "save the file as UTF-8"
        ) from error
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"not JSON at column {error.colno}: {error.msg}; "
            "each line must be one whole JSON object or list"
        ) from error
    except RecursionError as error:
        raise UsageError(_TOO_DEEP) from error
    except ValueError as error:  # Python refuses integers of thousands of digits
        raise UsageError("a number has too many digits") from error
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth_over(value, MAX_DEPTH):
        raise UsageError(_TOO_DEEP)
    if _SURROGATE.search(text):
        _check_surrogates(value)
    return value


_TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep"


def _refuse_constant(name: str) -> Any:
    raise UsageError(f"{name} is not a JSON number: leave it out or write null")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise UsageError(f"the number {_short(digits)} is too large")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UsageError(f"the key {_short(json.dumps(twice))} is given twice in one object")
    return found


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite
)


def _depth_over(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UsageError(
            f"half a surrogate pair ({half}) in a string: remove it or write the whole character"
        ) from error


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
