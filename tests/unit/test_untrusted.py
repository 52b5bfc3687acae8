from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.queue.messages import MAX_PAYLOAD
from kvq_worker.job import KvqJob
from kvq_worker.untrusted import TOO_LARGE, sanitized

GOOD = {
    b"data": zlib.compress(b'["f",null,[],{}]'),
    b"description": "12 tokens for m: ü".encode(),
    b"status": b"queued",
    b"origin": b"kvq",
    b"created_at": b"2026-01-02T03:04:05.678901Z",
    b"timeout": b"60",
    b"result_ttl": b"600",
    b"retries_left": b"3",
    b"dependency_ids": b'["abc", "d-e_f"]',
    b"enqueue_at_front": b"1",
}


def test_sound_fields_pass_and_the_payload_is_unpacked() -> None:
    assert sanitized(GOOD) == {**GOOD, b"data": b'["f",null,[],{}]'}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"success_callback_name", b"os.abort"),
        (b"failure_callback_name", b"os.abort"),
        (b"stopped_callback_name", b"os.abort"),
        (b"webhooks", b"[]"),
        (b"meta", b"{}"),
        (b"result", b"1"),
        (b"exc_info", b"x"),
        (b"repeats_left", b"1"),
        (b"group_id", b"g"),
        (b"rate_limit_key", b"k"),
        (b"retry_intervals", b"[9]"),
        (b"status", b"rate_limited"),
        (b"origin", b"../x"),
        (b"created_at", b"now"),
        (b"timeout", b"1h"),
        (b"dependency_ids", b'["../x"]'),
        (b"dependency_ids", b"[" * 50_000),
    ],
)
def test_what_kvq_does_not_use_or_is_malformed_is_left_out(name: bytes, value: bytes) -> None:
    assert name not in sanitized({name: value})


def test_numbers_are_brought_within_bounds() -> None:
    clean = sanitized({b"timeout": b"-1", b"result_ttl": b"999999999999", b"retries_left": b"99"})
    assert clean == {b"timeout": b"1", b"result_ttl": b"31622400", b"retries_left": b"10"}


def test_a_description_cannot_steer_a_terminal_or_forge_a_line() -> None:
    shown = sanitized({b"description": b"\x1b[2Jx\ny\xff" + b"z" * 900})[b"description"].decode()
    assert "\x1b" not in shown
    assert "\n" not in shown
    assert len(shown) <= 200


def test_a_payload_that_unpacks_beyond_all_bounds_is_not_unpacked() -> None:
    bomb = zlib.compress(b" " * (MAX_PAYLOAD + 10))
    assert len(bomb) < 1 << 20
    assert sanitized({b"data": bomb})[b"data"] == TOO_LARGE


@given(st.dictionaries(st.sampled_from([*GOOD, b"webhooks", b"meta"]), st.binary(max_size=80)))
def test_rq_can_read_whatever_is_left(raw: dict[bytes, bytes]) -> None:
    job = KvqJob("x", connection=object())
    job.restore({b"data": b"[]", **raw})
    assert job.webhooks == []
    assert job.success_callback is job.failure_callback is job.stopped_callback is None
