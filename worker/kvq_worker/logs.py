"""What a worker writes to its log: one line for each job, as text or as JSON, nothing of a prompt.

RQ sets up the handlers; this changes how their lines look, and leaves out RQ's several lines a job.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kvq.queue.results import State
from kvq.units import format_bytes, format_seconds

log = logging.getLogger("rq.worker")

FORMATS = ("text", "json")
#: Ids and names that a line gives; a job can have thousands.
_NAMED = 20
#: What a line of JSON tells of a stored job, as far as the result has it.
_FACTS = ("model", "codec", "tokens", "reused_tokens", "prefilled_tokens", "bytes",
          "bytes_written", "prefill_seconds", "seconds", "quality")  # fmt: skip
_LOGIN = re.compile(r"(?P<scheme>[a-z+]+://)[^\s/@]*(:[^\s@]*)?@", re.IGNORECASE)
#: Templates of RQ's lines about a single job, which `job_ended` says in one.
_OF_ONE_JOB = (
    "Successfully completed %s job in %ss on worker %s",
    "Successfully completed job %s in %ss on worker %s",
    "Worker %s: %s: %s (%s)",
    "Job %s: enqueued for retry, %s remaining",
)


def set_up(log_format: str) -> None:
    """Make the worker's log quiet, and JSON if `log_format` is `json`. Doing so twice is harmless.

    Only loggers of RQ and kvq are touched; handlers that were set up before keep their streams.
    """
    for name in ("rq.worker", "rq.job", "kvq"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, _OneLineAJob) for one in logger.filters):
            logger.addFilter(_OneLineAJob())
        if log_format == "json":
            if not logger.handlers:
                logger.addHandler(logging.StreamHandler(sys.stdout))
                logger.propagate = False
            for handler in logger.handlers:
                handler.setFormatter(JsonLines())


def job_ended(job: Any, worker: str, result: Mapping[str, Any]) -> None:
    """Tell in one line what became of `job`, from what it returned."""
    message = _message_of(job)
    facts: dict[str, Any] = {"event": result["status"], "job": job.id, "worker": worker}
    facts |= {
        "batch": message.get("batch"),
        "custom_ids": [str(one) for one in message.get("custom_ids") or ()][:_NAMED],
        "caches": [str(one["name"]) for one in message.get("caches") or ()][:_NAMED],
    }
    if result["status"] == State.STORED.value:
        facts |= {name: result[name] for name in _FACTS if result.get(name) is not None}
        text = (
            f"{result['tokens']:,} tokens, {result['reused_tokens']:,} of them reused, "
            f"{format_bytes(result['bytes_written'])} written in "
            f"{format_seconds(result['seconds'])}"
        )
        log.info("stored %s: %s", job.description, text, extra={"kvq": facts})
    else:
        facts |= {"code": result.get("code"), "reason": result.get("message")}
        log.warning(
            "failed %s: %s (%s)",
            job.description,
            facts["reason"],
            facts["code"],
            extra={"kvq": facts},
        )


def job_given_up(job: Any, worker: str, how: str, why: str) -> None:
    """Tell in one line that `job` ends here without a result: `again`, `canceled` or `lost`."""
    facts = {"event": how, "job": job.id, "worker": worker, "reason": why}
    log.info("%s %s: %s", _GIVEN_UP.get(how, how), job.description, why, extra={"kvq": facts})


_GIVEN_UP = {"again": "gave back", "canceled": "canceled", "lost": "lost"}


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, event, and the facts or the message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line. Logins in URLs are masked, control characters escaped."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        facts = getattr(record, "kvq", None)
        if isinstance(facts, dict):
            line |= facts
        else:
            line |= {"event": "log", "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        return _LOGIN.sub(r"\g<scheme>***@", text)


class _OneLineAJob(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg not in _OF_ONE_JOB or record.levelno < logging.INFO


def _message_of(job: Any) -> Mapping[str, Any]:
    """The job's message as far as it is one; it may be anybody's."""
    try:
        message = job.args[0]
    except Exception:
        return {}
    sound = isinstance(message, dict) and all(
        isinstance(message.get(name, []), list) for name in ("custom_ids", "caches")
    )
    if not sound:
        return {}
    caches = [one for one in message.get("caches", ()) if isinstance(one, dict) and "name" in one]
    return {**message, "caches": caches}
