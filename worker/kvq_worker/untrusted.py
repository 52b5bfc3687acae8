"""Makes RQ's hash of a job safe to read: whoever has the Redis password may have written it."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from kvq.queue.messages import MAX_PAYLOAD

_DATE = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")
_NAME = re.compile(rb"[A-Za-z0-9_.-]{1,200}")
_INTEGER = re.compile(rb"-?\d{1,12}")
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\uffff]")
_STATES = {
    b"queued", b"finished", b"failed", b"started", b"deferred", b"scheduled", b"stopped",
    b"canceled", b"ready_to_enqueue", b"created",
}  # fmt: skip
_YEAR = 366 * 86400

#: What stands in for a payload that is too large to be looked at.
TOO_LARGE = b'["",null,[],{}]'


def sanitized(raw: Mapping[Any, Any]) -> dict[bytes, bytes]:
    """The fields of a job's hash that kvq uses and whose values are what they should be.

    Callbacks, webhooks, repeats, groups and rate limits are left out, as is anything malformed;
    numbers are brought within bounds. The payload comes out decompressed, at most MAX_PAYLOAD.
    """
    clean: dict[bytes, bytes] = {}
    for key, value in raw.items():
        name = key if isinstance(key, bytes) else str(key).encode()
        check = _CHECKS.get(name)
        if check is None or not isinstance(value, bytes):
            continue
        checked = check(value)
        if checked is not None:
            clean[name] = checked
    return clean


def _matching(pattern: re.Pattern[bytes]) -> Callable[[bytes], bytes | None]:
    return lambda value: value if pattern.fullmatch(value) else None


def _between(low: int, high: int) -> Callable[[bytes], bytes | None]:
    def check(value: bytes) -> bytes | None:
        if not _INTEGER.fullmatch(value):
            return None
        return str(min(high, max(low, int(value)))).encode()

    return check


def _state(value: bytes) -> bytes | None:
    return value if value in _STATES else None


def _description(value: bytes) -> bytes:
    text = value[:800].decode("utf-8", "replace")
    return _NOT_PRINTABLE.sub("?", text)[:200].encode()


def _job_ids(value: bytes) -> bytes | None:
    if len(value) > 1 << 20:
        return None
    try:
        ids = json.loads(value)
    except (ValueError, RecursionError):
        return None
    good = isinstance(ids, list) and all(
        isinstance(one, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", one) for one in ids
    )
    return value if good else None


def _payload(value: bytes) -> bytes:
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(value, MAX_PAYLOAD + 1)
    except zlib.error:
        data = value
    return data if len(data) <= MAX_PAYLOAD else TOO_LARGE


_CHECKS: dict[bytes, Callable[[bytes], bytes | None]] = {
    b"data": _payload,
    b"description": _description,
    b"status": _state,
    b"origin": _matching(_NAME),
    b"worker_name": _matching(_NAME),
    b"created_at": _matching(_DATE),
    b"enqueued_at": _matching(_DATE),
    b"started_at": _matching(_DATE),
    b"ended_at": _matching(_DATE),
    b"last_heartbeat": _matching(_DATE),
    b"timeout": _between(1, _YEAR),
    b"result_ttl": _between(1, _YEAR),
    b"failure_ttl": _between(1, _YEAR),
    b"ttl": _between(1, _YEAR),
    b"retries_left": _between(0, 10),
    b"enqueue_at_front": _between(0, 1),
    b"enqueue_at_front_on_retry": _between(0, 1),
    b"allow_dependency_failures": _between(0, 1),
    b"dependency_ids": _job_ids,
}
