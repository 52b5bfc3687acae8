from __future__ import annotations

import json
import zlib
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.errors import PromptTooLong
from kvq.queue.outcome import JobOutcome, read_outcome
from kvq.queue.results import FACTS, PromptResult, State, failed, stored


def reply(status: str, **fields: bytes) -> list[Any]:
    flat = [part for name, value in fields.items() for part in (name.encode(), value)]
    return [status.encode(), b"", b"mini-7", b"3", flat]


def returned(value: Any) -> JobOutcome:
    return read_outcome(reply("finished", return_value=b64encode(json.dumps(value).encode())))


def died(trace: str) -> JobOutcome:
    return read_outcome(reply("failed", exc_string=b64encode(zlib.compress(trace.encode()))))


def test_what_a_worker_returned_is_read() -> None:
    outcome = returned(stored(tokens=5, codec="q8", quality=None, other="left out"))
    assert outcome.state is State.STORED
    assert outcome.facts == {"tokens": 5, "codec": "q8", "quality": None}
    outcome = returned(failed(PromptTooLong("too long"), "mini-7"))
    assert (outcome.state, outcome.code) == (State.FAILED, "prompt_too_long")
    assert outcome.message == "too long"
    assert outcome.facts == {"worker": "mini-7"}


@pytest.mark.parametrize("status", ["queued", "started", "deferred", "scheduled", "created"])
def test_what_will_run_is_pending(status: str) -> None:
    assert read_outcome(reply(status)).state is State.PENDING


def test_canceled_and_unknown_jobs() -> None:
    assert read_outcome(reply("canceled")).state is State.CANCELED
    assert read_outcome(reply("")).state is State.LOST


def test_a_job_that_rq_gave_up_says_how_it_ended() -> None:
    outcome = died("Traceback ...\n  File x\nOSError: the disk is on fire\n")
    assert (outcome.state, outcome.code) == (State.FAILED, "worker_failed")
    assert outcome.message == (
        "it failed on mini-7 each of 4 times that it ran, at last with OSError: the disk is on fire"
    )
    outcome = died("Moved to FailedJobRegistry, due to AbandonedJobError, at 2026")
    assert outcome.message == "its worker died on mini-7 each of 4 times that it ran"
    assert "no reason" in read_outcome(reply("failed")).message


@given(st.sampled_from(["finished", "failed"]), st.binary(max_size=60), st.booleans())
def test_rubbish_in_redis_is_a_failure_not_an_error(status: str, data: bytes, coded: bool) -> None:
    value = b64encode(data) if coded else data
    outcome = read_outcome(reply(status, return_value=value, exc_string=value))
    assert outcome.state in (State.FAILED, State.STORED)


def test_a_bomb_of_a_trace_is_not_unpacked() -> None:
    bomb = b64encode(zlib.compress(b"x" * (64 << 20)))
    assert len(read_outcome(reply("failed", exc_string=bomb)).message) <= 4000


def test_lines_have_the_shape_of_openai_s_batch_output() -> None:
    facts = {name: 1 for name in FACTS}
    line = PromptResult(
        custom_id="a", state=State.STORED, name="cache", job_id="j", facts=facts
    ).line()
    assert set(line) == {"id", "custom_id", "response", "error"}
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    assert list(line["response"]["body"]) == ["object", "name", *FACTS]
    for state in (State.CANCELED, State.LOST, State.PENDING):
        line = PromptResult(custom_id="a", state=state).line()
        assert line["response"] is None
        assert line["error"]["code"] == state.value
        assert line["error"]["message"]
