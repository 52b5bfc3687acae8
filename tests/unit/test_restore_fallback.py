"""A file that is gone, replaced or damaged between match and load: the reader restores less."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import zoo
from mlx_lm.models.cache import make_prompt_cache

from kvq.errors import StoreUnavailable
from kvq.model.loading import LoadedModel, load
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import End, Match, Store
from kvq.store.blockfile import Header, Tensor, read_data, write_block
from kvq.store.keys import TokenIds
from kvq.store.use import MARK_EVERY

ARCHITECTURE = zoo.by_name("llama-64")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(zoo.save_folder(ARCHITECTURE, tmp_path_factory.mktemp("model"))))


@pytest.fixture
def ids() -> TokenIds:
    return np.array(zoo.prompt(ARCHITECTURE, 600), np.uint32)


@pytest.fixture
def store(tmp_path: Path, llm: LoadedModel, ids: TokenIds) -> Store:
    store = Store.create(tmp_path / "store")
    prefill(store, llm, ids)
    return store


def prefill(store: Store, llm: LoadedModel, ids: TokenIds) -> None:
    Prefiller(store, llm, step=200).run(PrefillRequest(token_ids=ids, name="it", codec="raw"))


def kv_path(match: Match, block: int) -> Path:
    return match.plan.kv[block].header.path


def flip_last_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def check(container, llm: LoadedModel, ids: TokenIds) -> None:
    """The container's next logits are those of a run without interruption."""
    rest = mx.array(ids[container.tokens :])[None]
    resumed = llm.model(rest, cache=container)[0, -1]
    whole = llm.model(mx.array(ids)[None], cache=make_prompt_cache(llm.model))[0, -1]
    np.testing.assert_allclose(np.array(resumed), np.array(whole), rtol=1e-4, atol=1e-4)


def test_a_block_that_a_sweep_removed_ends_the_match_before_it(store, llm, ids):
    match = store.match(llm.fingerprint, ids)
    kv_path(match, 1).unlink()
    container = match.load(llm.model)
    assert container.tokens == 256
    assert container.logits is None
    check(container, llm, ids)


def test_a_damaged_block_is_put_aside_and_the_reason_says_so(store, llm, ids):
    match = store.match(llm.fingerprint, ids)
    bad = kv_path(match, 1)
    flip_last_byte(bad)
    container = match.load(llm.model)
    assert container.tokens == 256
    assert container.reason.end is End.DAMAGED
    assert bad.name in container.reason.message
    assert not bad.exists()
    check(container, llm, ids)


def test_a_reader_that_may_not_write_reads_past_nothing_damaged(store, llm, ids, monkeypatch):
    match = store.match(llm.fingerprint, ids)
    monkeypatch.setattr(Store, "quarantine", lambda self, damage: False)
    flip_last_byte(kv_path(match, 2))
    container = match.load(llm.model)
    assert container.tokens == 512
    assert container.reason.end is End.DAMAGED
    check(container, llm, ids)


def test_two_readers_that_meet_the_same_damage_both_restore_the_rest(store, llm, ids):
    first, second = (store.match(llm.fingerprint, ids) for _ in range(2))
    flip_last_byte(kv_path(first, 1))
    assert first.load(llm.model).tokens == second.load(llm.model).tokens == 256


def test_a_block_that_was_written_anew_is_not_taken_for_a_damaged_one(store, llm, ids):
    match = store.match(llm.fingerprint, ids)
    write_with_other_bits(match.plan.kv[0].header)
    container = match.load(llm.model, upto=599)
    assert container.tokens == 599
    assert not (store.path / "quarantine").exists()
    check(container, llm, ids)


def write_with_other_bits(header: Header) -> None:
    """The same tokens from another machine, whose sums round otherwise."""
    data = read_data(header)
    data.view(np.float32)[:] *= np.float32(1 + 2**-20)
    write_block(
        header.path,
        header.meta,
        [
            Tensor(name=name, dtype=one.dtype, shape=one.shape, data=data[one.start : one.end].data)
            for name, one in header.tensors.items()
        ],
    )


def test_an_exact_hit_whose_logits_vanish_leaves_a_token_to_feed(store, llm, ids):
    match = store.match(llm.fingerprint, ids)
    assert match.exact
    match.plan.logits.path.unlink()
    container = match.load(llm.model, upto=match.resume_tokens)
    assert container.tokens == 599
    check(container, llm, ids)


def test_upto_holds_after_a_loss(store, llm, ids):
    match = store.match(llm.fingerprint, ids)
    kv_path(match, 2).unlink()
    assert match.load(llm.model, upto=300).tokens == 300
    kv_path(match, 1).unlink()
    assert match.load(llm.model, upto=300).tokens == 256


def test_a_disk_that_fails_is_named(store, llm, ids, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "/kv/block")

    monkeypatch.setattr("kvq.cache.filling.read_into", fail)
    with pytest.raises(StoreUnavailable, match="/kv/block: the disk or the network share"):
        store.match(llm.fingerprint, ids).load(llm.model)


def test_reading_marks_the_last_block_at_most_once_an_hour(store, llm, ids):
    match = store.match(llm.fingerprint, ids)
    path = kv_path(match, 2)
    then = path.stat().st_mtime - 10
    os.utime(path, (then, then))
    match.load(llm.model)
    assert path.stat().st_mtime == then
    long_ago = then - MARK_EVERY
    for one in range(3):
        os.utime(kv_path(match, one), (long_ago, long_ago))
    match.load(llm.model)
    assert path.stat().st_mtime > then
    assert kv_path(match, 0).stat().st_mtime == long_ago
