from __future__ import annotations

import contextlib
import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.errors import InvalidMessage
from kvq.queue.messages import CacheToWrite, PrefillMessage
from kvq.queue.shared_ids import SharedPrefix


def packed(*ids: int) -> bytes:
    return array("I", ids).tobytes()


FULL = PrefillMessage(
    model="mlx-community/Qwen3-8B-4bit",
    adapter="/adapters/a",
    store="/Volumes/kv",
    codec="raw",
    prefix=SharedPrefix.of(packed(1, 2, 3)),
    tail=packed(4, 5),
    caches=(
        CacheToWrite(name="a", ttl=60.0, pin=True, metadata={"k": [1, None]}),
        CacheToWrite(name="b"),
    ),
    keep=(2, 4),
    window_records="all",
    keep_every=256,
    max_kl=0.01,
    custom_ids=("one", "zwei ✓"),
    batch="b-1",
)


def test_a_message_survives_json() -> None:
    for message in (FULL, PrefillMessage(model="m", tail=packed(7))):
        again = PrefillMessage.decode(json.loads(json.dumps(message.encode())))
        assert again == message
    assert FULL.tokens == 5


def test_defaults_are_not_written() -> None:
    assert set(PrefillMessage(model="m", tail=packed(7)).encode()) == {
        "version",
        "model",
        "codec",
        "tail",
    }


def test_shared_ids_are_fetched_and_checked() -> None:
    held = {FULL.prefix.key: packed(1, 2, 3)} if FULL.prefix else {}
    assert FULL.token_ids(held.get) == packed(1, 2, 3, 4, 5)
    with pytest.raises(InvalidMessage, match="no longer in Redis"):
        FULL.token_ids(lambda key: None)
    for other in (packed(1, 2, 4), packed(1, 2)):
        with pytest.raises(InvalidMessage, match="not those of this job"):
            FULL.token_ids(lambda key, other=other: other)  # type: ignore[misc]


def test_the_id_is_of_the_work_not_of_who_asks_or_how_it_is_cut() -> None:
    ids = packed(1, 2, 3, 4, 5)
    same = PrefillMessage(**{**vars(FULL), "prefix": None, "tail": ids, "custom_ids": ("x",),
                             "batch": "other"})  # fmt: skip
    assert same.job_id(ids) == FULL.job_id(ids)
    others = [
        {"model": "other"},
        {"adapter": None},
        {"store": "/elsewhere"},
        {"codec": "q8"},
        {"keep": (2,)},
        {"caches": ()},
        {"max_kl": None},
    ]
    digests = {PrefillMessage(**{**vars(FULL), **change}).job_id(ids) for change in others}
    assert len(digests) == len(others)
    assert FULL.job_id(ids) not in digests
    assert FULL.job_id(packed(1, 2, 3, 4, 6)) != FULL.job_id(ids)


def test_job_ids_are_what_rq_accepts() -> None:
    from rq.job import validate_job_id

    validate_job_id(FULL.job_id(packed(1)))


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model is not a string"),
    ({"model": ""}, "model has 0 characters"),
    ({"model": "m" * 2000}, "model has 2000 characters"),
    ({"model": "m\x1b[2J"}, "control characters"),
    ({"codec": "pickle"}, "codec is 'pickle', not one of raw"),
    ({"codec": ["q8"]}, "codec is"),
    ({"tail": 5}, "tail is not a string"),
    ({"tail": "!!!"}, "tail is not base64"),
    ({"tail": "AAAA"}, "whole token ids"),
    ({"tail": ""}, "0 tokens"),
    ({"version": 2}, "newer kvq"),
    ({"version": True}, "version is True"),
    ({"prefix": "abc"}, "pair of digest and length"),
    ({"prefix": ["0" * 40, 0]}, "prefix length is 0"),
    ({"prefix": ["../../etc/passwd", 1]}, "40 hexadecimal"),
    ({"caches": [{"name": "../evil"}]}, "'../evil' is not a cache name"),
    ({"caches": [{"name": "a", "ttl": "nan"}]}, "ttl is nan"),
    ({"caches": [{"name": "a", "ttl": -1}]}, "ttl is -1"),
    ({"caches": [{"name": "a", "pin": 1}]}, "pin is"),
    ({"caches": [{"name": "a", "metadata": {"k": "x" * 70_000}}]}, "metadata takes"),
    ({"caches": [{"name": "a", "call": "os.system"}]}, "unknown field 'call'"),
    ({"caches": {}}, "caches is not a list"),
    ({"keep": [0]}, "keep is 0"),
    ({"keep": [9]}, "beyond the end"),
    ({"keep": [1.0]}, "keep is 1.0"),
    ({"keep": [1] * 100_001}, "keep has 100001 entries"),
    ({"window_records": "none"}, "window_records is 'none'"),
    ({"keep_every": 0}, "keep_every is 0"),
    ({"max_kl": float("inf")}, "max_kl is inf"),
    ({"custom_ids": [1]}, "custom_ids is not a string"),
    ({"batch": "b" * 65}, "batch has 65"),
    ({"__class__": "os.system"}, "unknown field '__class__'"),
]


@pytest.mark.parametrize(("change", "reason"), HOSTILE, ids=lambda v: str(v)[:40])
def test_what_no_producer_writes_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    source = {**PrefillMessage(model="m", tail=packed(7)).encode(), **change}
    with pytest.raises(InvalidMessage) as caught:
        PrefillMessage.decode(source)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@given(JSON, st.dictionaries(st.sampled_from(sorted(FULL.encode())), JSON))
def test_any_json_gives_a_message_or_invalid_message(whole: Any, parts: dict[str, Any]) -> None:
    for source in (whole, {**FULL.encode(), **parts}):
        with contextlib.suppress(InvalidMessage):
            assert PrefillMessage.decode(source).tokens > 0
