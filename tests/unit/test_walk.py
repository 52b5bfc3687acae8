"""Following ids down the trie: what is opened, and what the walk says of what it met."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from dummystore import (
    KV,
    KV_ONLY,
    RECURRENT,
    WINDOWED,
    blocks_of,
    check_plan,
    make_space,
    publish,
    rows_of,
    save,
)

from kvq.errors import DamagedFile, UnsupportedFormat
from kvq.store import End, Store
from kvq.store import walk as walk_module
from kvq.store.blockfile import read_header
from kvq.store.children import list_children
from kvq.store.keys import BLOCK, ROOT, as_ids
from kvq.store.layout import block_path, node_dir
from kvq.store.restorable import Restorable
from kvq.store.walk import walk

TEXT = np.random.default_rng(3).integers(0, 100_000, 2000).astype(np.uint32)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Names of the files whose headers the walk reads."""
    names: list[str] = []

    def watched(path: Path):
        names.append(path.name)
        return read_header(path)

    monkeypatch.setattr(walk_module, "read_header", watched)
    return names


def with_tail(ids: np.ndarray, *tail: int) -> np.ndarray:
    return np.concatenate([ids, np.array(tail, np.uint32)])


def test_an_empty_space(store):
    walked = walk(store.space_folder(KV_ONLY), TEXT[:300])
    assert (walked.extent, walked.chain, walked.tails, walked.damaged) == (0, (), (), ())
    assert walked.children.count == 0


def test_full_blocks_are_followed_without_listing(store, opened):
    save(store, KV_ONLY, TEXT[:1100])
    walked = walk(store.space_folder(KV_ONLY), TEXT[:1100])
    assert [step.start for step in walked.chain] == [0, 256, 512, 768]
    assert [(tail.start, tail.common, tail.whole) for tail in walked.tails] == [(1024, 76, True)]
    assert len(opened) == 5


def test_a_match_ends_inside_a_block(store):
    save(store, KV_ONLY, TEXT[:512])
    walked = walk(store.space_folder(KV_ONLY), with_tail(TEXT[:300], 1, 2, 3))
    assert walked.extent == 300
    assert [(tail.start, tail.common, tail.whole) for tail in walked.tails] == [(256, 44, False)]


def test_among_many_siblings_only_the_promising_are_opened(store, opened):
    for first in range(200):
        save(store, KV_ONLY, with_tail(TEXT[:BLOCK], first, *range(30)))
    save(store, KV_ONLY, TEXT[:400])
    opened.clear()
    assert walk(store.space_folder(KV_ONLY), TEXT[:350]).extent == 350
    assert len(opened) == 2


def test_siblings_that_end_inside_the_prompt_are_told_apart_by_their_keys(store, opened):
    """They share 16 tokens, so their codes are the same; only one goes on as the prompt does."""
    for number in range(50):
        save(store, RECURRENT, with_tail(TEXT[:20], number, number))
    save(store, RECURRENT, TEXT[:22])
    opened.clear()
    match = store.match(RECURRENT.fingerprint, TEXT[:60])
    assert match.tokens == 22
    # The longest is found by opening it, whatever shares less is not looked at.
    assert len(opened) == 1


def test_no_tensor_is_read_to_decide(store, monkeypatch):
    save(store, WINDOWED, TEXT[:700], kept=(300,))

    def refuse(*_: object) -> None:
        raise AssertionError("read tensor data")

    monkeypatch.setattr(os, "preadv", refuse)
    assert store.match(WINDOWED.fingerprint, TEXT[:700]).tokens == 700


def test_a_missing_block_ends_the_chain(store):
    saved = save(store, KV_ONLY, TEXT[:1100])
    saved[2].path.unlink()
    walked = walk(store.space_folder(KV_ONLY), TEXT[:1100])
    assert walked.extent == 512
    assert walked.damaged == ()


def test_a_damaged_block_ends_the_chain_and_is_named(store):
    saved = save(store, KV_ONLY, TEXT[:1100])
    saved[2].path.write_bytes(b"bad")
    walked = walk(store.space_folder(KV_ONLY), TEXT[:1100])
    assert walked.extent == 512
    (damage,) = walked.damaged
    assert damage.path == str(saved[2].path)


def test_damage_is_put_aside_by_a_match(store):
    saved = save(store, KV_ONLY, TEXT[:1100])
    saved[2].path.write_bytes(b"bad")
    match = store.match(KV_ONLY.fingerprint, TEXT[:1100])
    assert (match.tokens, match.reason.end) == (512, End.DAMAGED)
    assert not saved[2].path.exists()
    match = store.match(KV_ONLY.fingerprint, TEXT[:1100])
    assert (match.tokens, match.reason.end) == (512, End.STORED_ENDS)


def test_files_to_avoid_count_as_damaged(store):
    saved = save(store, WINDOWED, TEXT[:600])
    folder = store.space_folder(WINDOWED)
    walked = walk(folder, TEXT[:600], avoid={saved[0].path: "was bad"})
    assert walked.extent == 0
    assert isinstance(walked.damaged[0], DamagedFile)
    window = next(one.path for one in saved if one.record == "window")
    restorable = Restorable(walk(folder, TEXT[:600], avoid={window: "was bad"}), WINDOWED.needs)
    assert restorable.deepest().tokens == 600
    assert restorable.deepest(520).tokens == 0
    assert [one.reason for one in restorable.damaged] == ["was bad"]


@pytest.mark.parametrize("wrong", ["parent", "tokens", "start", "record", "space"])
def test_a_file_in_anothers_place_is_damaged(store, wrong):
    """Its digests hold, but it is not what its name says."""
    save(store, KV_ONLY, TEXT[:600])
    ((first, _), (block, start), _) = blocks_of(TEXT[:600])
    path = block_path(store.space_folder(KV_ONLY), block)
    ids, rows = TEXT.copy(), rows_of(TEXT[256:512])
    space, record, name = KV_ONLY, "kv", block
    if wrong == "parent":
        name = first
    elif wrong == "tokens":
        ids[300] += 1
    elif wrong == "start":
        ids, start = np.concatenate([TEXT[:256], TEXT]), 512
    elif wrong == "record":
        record = "window"
    else:
        space = make_space(KV, codec="q8")
    publish(path, space, name, ids, start, record, rows)
    match = store.match(KV_ONLY.fingerprint, TEXT[:600])
    assert (match.tokens, match.reason.end) == (256, End.DAMAGED)


def test_a_window_of_another_block_is_damaged(store):
    saved = save(store, WINDOWED, TEXT[:600])
    first, second = [one.path for one in saved if one.record == "window"]
    first.write_bytes(second.read_bytes())
    # The end needs only the last 64 tokens, which are the second's own.
    assert store.match(WINDOWED.fingerprint, TEXT[:600]).tokens == 600
    assert store.match(WINDOWED.fingerprint, TEXT[:520]).tokens == 0
    assert not first.exists()


def test_a_newer_block_is_not_guessed_at(store, monkeypatch):
    saved = save(store, KV_ONLY, TEXT[:300])
    raw = saved[0].path.read_bytes()
    monkeypatch.setattr("kvq.store.blockfile.FORMAT", 0)
    with pytest.raises(UnsupportedFormat):
        store.match(KV_ONLY.fingerprint, TEXT[:300])
    assert saved[0].path.read_bytes() == raw


def test_other_files_in_a_node_are_ignored(store):
    save(store, KV_ONLY, TEXT[:300])
    folder = node_dir(store.space_folder(KV_ONLY), ROOT)
    (folder / ".tmp-1-2.safetensors").write_bytes(b"x")
    (folder / "Thumbs.db").write_bytes(b"x")
    (folder / "subfolder").mkdir()
    assert list_children(store.space_folder(KV_ONLY), ROOT, TEXT[:300]).count == 1
    assert store.match(KV_ONLY.fingerprint, TEXT[:300]).tokens == 300


def test_a_state_kept_by_another_prompt_inside_the_chain_is_found(store):
    """The chain of a long prompt goes past the block in which a shorter one ended."""
    save(store, RECURRENT, TEXT[:1500])
    save(store, RECURRENT, TEXT[:700])
    match = store.match(RECURRENT.fingerprint, with_tail(TEXT[:1400], 1, 2))
    assert (match.tokens, match.reason.end) == (700, End.STATE_TOO_SHALLOW)
    assert match.reason.position == 1400
    check_plan(match.plan, TEXT, RECURRENT)


def test_window_records_kept_by_another_prompt_inside_the_chain_are_found(store):
    save(store, WINDOWED, TEXT[:1900])
    save(store, WINDOWED, TEXT[:700])
    match = store.match(WINDOWED.fingerprint, TEXT[:1000])
    assert (match.tokens, match.reason.end) == (700, End.WINDOW_NOT_KEPT)
    check_plan(match.plan, TEXT, WINDOWED)


def test_an_exact_end_wins_over_a_longer_sibling(store):
    save(store, KV_ONLY, TEXT[:500])
    save(store, KV_ONLY, TEXT[:300])
    assert store.match(KV_ONLY.fingerprint, TEXT[:300]).exact
    assert not store.match(KV_ONLY.fingerprint, TEXT[:301]).exact


def test_no_tokens_match_nothing(store):
    save(store, KV_ONLY, TEXT[:300])
    match = store.match(KV_ONLY.fingerprint, as_ids([]))
    assert (match.tokens, match.exact, match.resume_tokens) == (0, False, 0)
