"""Reads what RQ kept of a finished job. It may be anyone's, so nothing in it is believed."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvq.queue.enqueue import RETRIES
from kvq.queue.results import FACTS, State

_MAX_RESULT = 1 << 20
_PENDING = {"queued", "started", "deferred", "scheduled", "ready_to_enqueue", "created"}


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """How a job ended, if it did. `facts` are those of `FACTS` that the worker reported."""

    state: State
    facts: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    message: str = ""


#: Of a prompt that needed no job.
ALREADY_STORED = JobOutcome(state=State.STORED)


def read_outcome(reply: Sequence[Any]) -> JobOutcome:
    """The outcome in one job's part of what the script RESULTS returns."""
    status, _, worker, _, flat = reply
    name = _text(status)
    if not name:
        return JobOutcome(state=State.LOST)
    if name in _PENDING:
        return JobOutcome(state=State.PENDING)
    if name == "canceled":
        return JobOutcome(state=State.CANCELED)
    fields = {_text(key): value for key, value in zip(flat[::2], flat[1::2], strict=False)}
    if name == "finished":
        return _returned(fields.get("return_value", b""))
    return _died(fields.get("exc_string", b""), _text(worker))


def _returned(encoded: bytes) -> JobOutcome:
    try:
        value = json.loads(b64decode(encoded[: 2 * _MAX_RESULT], validate=True))
        status, known = value["status"], {name: value[name] for name in FACTS if name in value}
        if status == State.STORED:
            return JobOutcome(state=State.STORED, facts=known)
        if status == State.FAILED:
            code, message = str(value["code"]), str(value["message"])
            return JobOutcome(state=State.FAILED, facts=known, code=code, message=message)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return JobOutcome(
        state=State.FAILED,
        code="invalid_result",
        message="the worker returned something that is not a result: is it a kvq worker?",
    )


def _died(encoded: bytes, worker: str) -> JobOutcome:
    try:
        inflate = zlib.decompressobj()
        trace = inflate.decompress(b64decode(encoded, validate=True), _MAX_RESULT).decode()
    except (ValueError, zlib.error):
        trace = ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    last = lines[-1] if lines else "no reason is known"
    where = f" on {worker}" if worker else ""
    if "AbandonedJobError" in last or "work-horse terminated" in last.lower():
        message = f"its worker died{where} each of {RETRIES + 1} times that it ran"
    else:
        message = f"it failed{where} each of {RETRIES + 1} times that it ran, at last with {last}"
    return JobOutcome(state=State.FAILED, code="worker_failed", message=message[:4000])


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
