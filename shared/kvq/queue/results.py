"""What became of a prompt: from a worker's return value to a line of a results file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvq.errors import KvqError

#: Facts of a cache that a worker reports and a result's body shows, in this order.
FACTS = (
    "store",
    "export",
    "model",
    "space",
    "codec",
    "tokens",
    "reused_tokens",
    "prefilled_tokens",
    "lossy_prefix_tokens",
    "quality",
    "bytes",
    "bytes_written",
    "prefill_seconds",
    "seconds",
    "worker",
)


class State(StrEnum):
    """How a prompt stands."""

    STORED = "stored"
    FAILED = "failed"
    CANCELED = "canceled"
    #: Redis no longer knows its job; submitting again is safe.
    LOST = "lost"
    PENDING = "pending"


def stored(**facts: Any) -> dict[str, Any]:
    """What a job returns when its blocks and caches are stored."""
    return {"status": State.STORED.value, **facts}


def failed(error: KvqError, worker: str) -> dict[str, Any]:
    """What a job returns when its prompt can never succeed."""
    return {
        "status": State.FAILED.value,
        "code": error_code(error),
        "message": str(error)[:4000],
        "worker": worker,
    }


def error_code(error: BaseException) -> str:
    """`PromptTooLong` as `prompt_too_long`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """What became of one prompt of a batch. `facts` are those of `FACTS` that are known."""

    custom_id: str
    state: State
    name: str | None = None
    job_id: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    message: str = ""

    def line(self) -> dict[str, Any]:
        """One line of a results file, in the shape of OpenAI's batch output."""
        shown: dict[str, Any] = {
            "id": f"kvq-{self.job_id or self.name or self.custom_id}",
            "custom_id": self.custom_id,
            "response": None,
            "error": None,
        }
        if self.state is State.STORED:
            body = {"object": "kvq.cache", "name": self.name}
            body |= {name: self.facts[name] for name in FACTS if name in self.facts}
            shown["response"] = {"status_code": 200, "request_id": self.job_id, "body": body}
        else:
            code = self.code or self.state.value
            shown["error"] = {"code": code, "message": self.message or DEFAULT_MESSAGES[self.state]}
        return shown


DEFAULT_MESSAGES = {
    State.STORED: "stored",
    State.FAILED: "the worker gave no reason",
    State.CANCELED: "canceled before it ran",
    State.LOST: "Redis no longer knows this job: submit again",
    State.PENDING: "not finished yet",
}
