"""The buffers between files and a card, as far as a machine without a card can show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import zoo

from kvq.cache import card, filling, staging
from kvq.cache.leaves import leaf_caches
from kvq.cache.staging import Outgoing, Sent, Slot, Staging
from kvq.model.loading import load
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import End, Store

pytestmark = pytest.mark.skipif(staging.is_discrete(), reason="this machine has such a card")


def test_a_buffer_gives_what_was_put_into_it() -> None:
    slot = Slot(1000)
    slot.view[:1000] = np.arange(1000) % 256
    assert slot.load(1000)[:1000].tolist() == (np.arange(1000) % 256).tolist()


def test_arrays_are_laid_out_one_after_the_other() -> None:
    arrays = {"a": mx.arange(5, dtype=mx.uint16), "b": mx.zeros((0, 3)), "c": mx.array([[1.5]])}
    views = Slot(4096).store(arrays, ())
    assert {name: bytes(view) for name, view in views.items()} == {
        name: np.array(array).tobytes() for name, array in arrays.items()
    }


def test_where_memory_is_unified_arrays_go_out_as_they_are() -> None:
    arrays = {"a": mx.arange(5, dtype=mx.uint16)}
    outgoing = Outgoing(arrays)
    assert outgoing.arrays() == [arrays["a"]]
    sent = outgoing.send()
    assert sent.data("a") is arrays["a"]
    sent.done()


def test_what_a_card_has_is_fetched_when_it_is_asked_for_and_let_go_of_when_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Staging()
    monkeypatch.setattr(staging, "STAGING", pool)
    arrays = {"a": mx.arange(5, dtype=mx.uint16), "b": mx.array([[1.5]])}
    sent = Sent(arrays, addresses=[1, 2])  # without a card, the arrays themselves are read
    assert bytes(sent.data("b")) == np.array(arrays["b"]).tobytes()
    assert bytes(sent.data("a")) == np.array(arrays["a"]).tobytes()
    assert pool._free == []
    sent.done()
    assert len(pool._free) == 1


class _Driver:
    """Takes every call of the driver's interface; the one named `broken` fails."""

    def __init__(self, broken: str = "") -> None:
        self.calls: list[str] = []
        self._broken = broken

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_: object) -> int:
            self.calls.append(name)
            return 700 if name == self._broken else 0

        return call


@pytest.fixture(params=["", "cuStreamSynchronize"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Driver]:
    fake = _Driver(request.param)
    monkeypatch.setattr(card, "_driver", lambda: fake)
    yield fake
    card._context.cache_clear()
    card._copy_stream.cache_clear()


def test_each_thread_enters_the_cards_context_before_it_asks_for_a_copy(driver: _Driver) -> None:
    copies = [(0, 1 << 40, 10), (16, 2 << 40, 20)]
    if driver._broken:
        with pytest.raises(RuntimeError, match=r"failed at cuStreamSynchronize \(CUresult 700\)"):
            card.copy_to_host(copies)
    else:
        card.copy_to_host(copies)
    assert driver.calls == [
        *("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuStreamCreate"),
        *("cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"),
    ]
    memory = card.map_memory(1)
    assert card.lock(memory)
    driver.calls.clear()
    del memory  # on whichever thread that happens
    assert driver.calls == ["cuCtxSetCurrent", "cuMemHostUnregister"]


def test_free_buffers_are_used_again_and_kept_up_to_a_limit() -> None:
    pool = Staging(kept_bytes=6 << 20)
    small, large = pool.take(1 << 20), pool.take(3 << 20)
    assert (small.size, large.size) == (2 << 20, 4 << 20)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(2 << 20) is small
    assert pool.take(1 << 20) is large
    pool.give_back(small)
    pool.give_back(large)
    pool.give_back(Slot(2 << 20))  # 8 MiB now: the one that was given back first goes
    assert pool.take(4 << 20) is large
    assert pool.take(1 << 20) is not small


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Staging:
    """Restores go through buffers, as on a card with memory of its own: four at a time."""
    pool = Staging()
    monkeypatch.setattr(filling, "is_discrete", lambda: True)
    monkeypatch.setattr(filling, "STAGING", pool)
    monkeypatch.setattr(filling, "STAGED_BYTES", 0)
    return pool


@pytest.mark.parametrize("codec", ["raw", "q8", "q4"])
@pytest.mark.parametrize("name", ["llama-64", "gemma3_text"])
def test_a_restore_through_buffers_is_the_same(
    tmp_path: Path, name: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = zoo.by_name(name)
    llm = load(str(zoo.save_folder(architecture, tmp_path / "model")))
    store = Store.create(tmp_path / "store")
    ids = np.array(zoo.prompt(architecture, 2000), np.uint32)
    Prefiller(store, llm).run(PrefillRequest(token_ids=ids, name="it", codec=codec))
    match = store.match(llm.fingerprint, ids)
    expected = match.load(llm.model)
    monkeypatch.setattr(filling, "is_discrete", lambda: True)
    monkeypatch.setattr(filling, "STAGED_BYTES", 0)
    found = match.load(llm.model)
    for one, other in zip(leaf_caches(expected), leaf_caches(found), strict=True):
        assert mx.array_equal(one.keys, other.keys)
        assert mx.array_equal(one.values, other.values)


def test_a_damaged_file_leaves_no_buffer_behind(tmp_path: Path, pool: Staging) -> None:
    architecture = zoo.by_name("llama-64")
    llm = load(str(zoo.save_folder(architecture, tmp_path / "model")))
    store = Store.create(tmp_path / "store")
    ids = np.array(zoo.prompt(architecture, 2000), np.uint32)
    Prefiller(store, llm).run(PrefillRequest(token_ids=ids, name="it", codec="raw"))
    match = store.match(llm.fingerprint, ids)
    path = match.plan.kv[5].header.path
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    container = match.load(llm.model)
    assert container.tokens == 5 * 256
    assert container.reason.end == End.DAMAGED
    assert len(pool._free) == 4
