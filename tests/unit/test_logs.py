from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvq_worker import logs
from kvq_worker.logs import JsonLines


def record(message: str, *args: object, level: int = logging.INFO, **extra: Any) -> Any:
    made = logging.LogRecord("rq.worker", level, "file.py", 1, message, args, None)
    vars(made).update(extra)
    return made


def job(*arguments: Any, description: str = "9 tokens for m: c") -> Any:
    return SimpleNamespace(id="j1", args=arguments, description=description)


STORED = {
    "status": "stored", "model": "org/m", "codec": "q8", "tokens": 9000, "reused_tokens": 512,
    "prefilled_tokens": 8488, "bytes": 5000, "bytes_written": 4_000_000, "prefill_seconds": 2.5,
    "seconds": 3.0, "quality": None, "store": "/kv", "worker": "w",
}  # fmt: skip


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(JsonLines().format(one)) for one in caplog.records]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "rq.worker")
    return caplog


def test_a_line_is_json_whatever_is_in_the_message() -> None:
    line = JsonLines().format(record('two\nlines, "quotes" and \x1b[2J, %s', "été"))
    assert "\n" not in line
    assert "\x1b" not in line
    assert json.loads(line)["message"] == 'two\nlines, "quotes" and \x1b[2J, été'


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:hunter2@h:1/0",
        "rediss://:hunter2@h/0",
        "redis+sentinel://u:hunter2@a:1,b:2/s",
        "unix://:hunter2@/run/s.sock",
    ],
)
def test_logins_are_masked(url: str) -> None:
    line = JsonLines().format(record(f"cannot reach {url} (refused)"))
    assert "hunter2" not in line
    assert "***@" in line


def test_a_traceback_is_in_its_line_and_masked_too() -> None:
    try:
        raise OSError("redis://:hunter2@h/0 is gone")
    except OSError as error:
        one = record("failed", exc_info=(type(error), error, error.__traceback__))
    line = JsonLines().format(one)
    assert "Traceback" in json.loads(line)["traceback"]
    assert "hunter2" not in line


def test_a_stored_job_is_one_line_of_facts(log: pytest.LogCaptureFixture) -> None:
    message = {
        "batch": "b", "custom_ids": [f"p{n}" for n in range(99)], "tail": "c2VjcmV0",
        "caches": [{"name": "c", "metadata": {"who": "me"}}],
    }  # fmt: skip
    logs.job_ended(job(message), "w", STORED)
    assert log.messages == [
        "stored 9 tokens for m: c: 9,000 tokens, 512 of them reused, 4.00 MB written in 3.0 s"
    ]
    (line,) = lines(log)
    assert {k: line[k] for k in ("event", "job", "batch", "caches", "tokens", "seconds")} == {
        "event": "stored", "job": "j1", "batch": "b", "caches": ["c"], "tokens": 9000,
        "seconds": 3.0,
    }  # fmt: skip
    assert len(line["custom_ids"]) == 20
    assert "quality" not in line
    assert "c2VjcmV0" not in json.dumps(line)
    assert "who" not in json.dumps(line)


@pytest.mark.parametrize(
    "arguments", [(), ("text",), (None,), ({"caches": "x"},), ({"caches": [1, {"name": "c"}]},)]
)
def test_a_message_that_is_none_hurts_nothing(
    arguments: tuple[Any, ...], log: pytest.LogCaptureFixture
) -> None:
    failed = {"status": "failed", "code": "invalid_message", "message": "no", "worker": "w"}
    logs.job_ended(job(*arguments), "w", failed)
    (line,) = lines(log)
    assert (line["event"], line["code"], line["reason"]) == ("failed", "invalid_message", "no")


def test_rq_s_lines_about_one_job_are_left_out_and_others_are_not() -> None:
    logs.set_up("text")
    logs.set_up("text")
    logger = logging.getLogger("rq.worker")
    assert len([one for one in logger.filters if type(one).__module__ == logs.__name__]) == 1
    done = record("Successfully completed %s job in %ss on worker %s", "x", "1", "w")
    assert not logger.filter(done)
    assert logger.filter(record("*** Listening on %s...", "kvq"))
    assert logger.filter(record("Worker %s: stopping on request", "w"))
