"""Why a prompt resumes where it does: every reason, the first differing token, other models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from dummystore import KV, KV_ONLY, RECURRENT, WINDOWED, files_in, make_space, save, save_cache

from kvq.store import End, Store
from kvq.store.why import InSpace, why

PROMPT = tuple(range(1000, 1600))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{one}" for one in ids)


def only(store: Store, ids: Sequence[int], **how: object) -> InSpace:
    found = why(store, KV_ONLY.fingerprint, ids, **how)
    assert len(found.spaces) == 1
    assert found.tokens == found.spaces[0].tokens
    assert found.message == found.spaces[0].reason.message
    assert found.asked_tokens == len(ids)
    return found.spaces[0]


def changed(at: int, token: int = 7) -> tuple[int, ...]:
    return (*PROMPT[:at], token, *PROMPT[at + 1 :])


def test_all_of_it_is_stored(store: Store) -> None:
    save(store, KV_ONLY, PROMPT)
    one = only(store, PROMPT)
    assert (one.tokens, one.shared_tokens, one.exact) == (600, 600, True)
    assert one.reason.end is End.COMPLETE
    assert one.difference is None
    assert one.quarantined == ()
    assert (one.codec, one.dtype, one.space) == ("raw", "float32", KV_ONLY.digest)


def test_all_of_it_is_stored_but_goes_on(store: Store) -> None:
    save(store, KV_ONLY, PROMPT)
    one = only(store, PROMPT[:550])
    assert (one.tokens, one.exact) == (550, False)
    assert one.reason.end is End.COMPLETE
    assert one.difference is None


@pytest.mark.parametrize("at", [1, 3, 255, 257, 300, 511, 513, 599])
def test_the_first_differing_token_has_its_surroundings(store: Store, at: int) -> None:
    save(store, KV_ONLY, PROMPT)
    asked = changed(at)
    one = only(store, asked, decode=words, around=3)
    assert (one.tokens, one.shared_tokens) == (at, at)
    assert one.reason.end is End.DIVERGED
    assert one.difference is not None
    assert one.difference.position == at
    assert one.difference.before.ids == PROMPT[max(0, at - 3) : at]
    assert one.difference.asked.ids == asked[at : at + 3]
    end = min(at + 3, at // 256 * 256 + 256)
    assert one.difference.stored.ids == PROMPT[at:end]
    assert one.difference.stored.text == words(PROMPT[at:end])
    assert one.difference.asked.text == words(asked[at : at + 3])
    assert one.difference.siblings == 1


@pytest.mark.parametrize("at", [0, 256, 512])
def test_a_difference_where_a_block_begins_shows_what_is_stored_there(
    store: Store, at: int
) -> None:
    save(store, KV_ONLY, PROMPT)
    one = only(store, changed(at))
    assert one.tokens == at
    assert one.reason.end is End.DIVERGED
    assert one.difference is not None
    assert one.difference.position == at
    assert one.difference.stored.ids == PROMPT[at : at + 8]
    assert one.difference.stored.text is None
    assert one.difference.before.ids == PROMPT[max(0, at - 8) : at]


def test_of_several_siblings_one_is_shown_and_all_are_counted(store: Store) -> None:
    for token in (11, 12, 13):
        save(store, KV_ONLY, (*PROMPT[:256], token, token, token))
    one = only(store, PROMPT)
    assert one.tokens == 256
    assert one.difference is not None
    assert one.difference.siblings == 3
    assert one.difference.stored.ids[0] in (11, 12, 13)


def test_what_is_stored_may_merely_end(store: Store) -> None:
    save(store, KV_ONLY, PROMPT[:300])
    one = only(store, PROMPT)
    assert (one.tokens, one.difference) == (300, None)
    assert one.reason.end is End.STORED_ENDS


def test_a_sibling_that_left_earlier_is_not_the_reason(store: Store) -> None:
    save(store, KV_ONLY, (*PROMPT[:270], *range(5000, 5242)))
    save(store, KV_ONLY, PROMPT[:300])
    one = only(store, PROMPT)
    assert one.tokens == 300
    assert one.reason.end is End.STORED_ENDS
    assert one.reason.position == 300
    assert one.difference is None


def test_a_recurrent_state_may_be_missing(store: Store) -> None:
    save(store, RECURRENT, PROMPT, kept=[100])
    one = only(store, (*PROMPT[:200], 1))
    assert (one.tokens, one.shared_tokens) == (100, 200)
    assert one.reason.end is End.STATE_TOO_SHALLOW
    assert one.difference is not None
    assert one.difference.position == 200


def test_window_records_may_be_missing(store: Store) -> None:
    long = tuple(range(2000))
    save(store, WINDOWED, long)
    one = only(store, (*long[:1000], 9))
    assert one.reason.end is End.WINDOW_NOT_KEPT
    assert (one.tokens, one.shared_tokens) == (0, 1000)


def test_damage_is_the_reason_and_nothing_is_moved(store: Store) -> None:
    saved = save(store, KV_ONLY, PROMPT)
    second = next(one.path for one in saved if one.record == "kv" and one.start == 256)
    data = bytearray(second.read_bytes())
    data[40] ^= 1
    second.write_bytes(data)
    before = files_in(store.path)
    for _ in range(2):
        one = only(store, PROMPT)
        assert one.tokens == 256
        assert one.reason.end is End.DAMAGED
        assert one.difference is None
    assert files_in(store.path) == before

    # A match takes the file out of the way: after that the reason is in the quarantine.
    store.match(KV_ONLY.fingerprint, PROMPT)
    one = only(store, PROMPT)
    assert one.tokens == 256
    assert len(one.quarantined) == 1
    assert one.quarantined[0].startswith(second.name)
    # It does not concern a prompt that ends before it, or leaves before it.
    assert only(store, PROMPT[:200]).quarantined == ()
    assert only(store, changed(100)).quarantined == ()


def test_each_space_of_the_model_answers_and_the_longest_is_first(store: Store) -> None:
    lossy = make_space(KV, codec="q8")
    save(store, KV_ONLY, PROMPT[:100])
    save(store, lossy, PROMPT)
    found = why(store, KV_ONLY.fingerprint, PROMPT)
    assert [(one.codec, one.tokens) for one in found.spaces] == [("q8", 600), ("raw", 100)]
    assert found.tokens == 600
    found = why(store, KV_ONLY.fingerprint, PROMPT, codecs=["raw"])
    assert [(one.codec, one.tokens) for one in found.spaces] == [("raw", 100)]


def test_other_models_that_hold_the_ids_are_named(store: Store) -> None:
    other = make_space(KV, fingerprint="a" * 40)
    save_cache(store, other, "theirs", PROMPT, model="their/model")
    third = make_space(KV, fingerprint="b" * 40)
    save(store, third, changed(0))
    found = why(store, KV_ONLY.fingerprint, PROMPT)
    assert found.spaces == ()
    assert found.tokens == 0
    assert "nothing of this model" in found.message
    assert [(one.models, one.shared_tokens) for one in found.others] == [(("their/model",), 600)]


def test_an_empty_store_and_a_codec_that_is_not_there(store: Store) -> None:
    assert why(store, KV_ONLY.fingerprint, PROMPT).message == "the store is empty"
    save(store, KV_ONLY, PROMPT)
    found = why(store, KV_ONLY.fingerprint, PROMPT, codecs=["q4"])
    assert found.spaces == ()
    assert "with codec raw only" in found.message


def test_the_answer_is_json(store: Store) -> None:
    save(store, KV_ONLY, PROMPT)
    facts = why(store, KV_ONLY.fingerprint, changed(300), decode=words).as_json()
    assert json.loads(json.dumps(facts)) == facts
    space = facts["spaces"][0]
    assert space["reason"]["end"] == "diverged"
    assert space["reason"]["stored"] == PROMPT[300]
    assert space["difference"]["stored"]["ids"] == list(PROMPT[300:308])
