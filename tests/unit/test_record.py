"""What was measured of a prompt is known under any name, and each manifest is read once for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zoo

from kvq.model.loading import LoadedModel, load
from kvq.prefill import Prefiller, PrefillRequest
from kvq.prefill.record import Records
from kvq.store import Store

ARCHITECTURE = zoo.by_name("llama-64")
IDS = [np.array(zoo.prompt(ARCHITECTURE, 700), np.uint32)[start:] for start in (0, 1, 2)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(zoo.save_folder(ARCHITECTURE, tmp_path_factory.mktemp("model"))))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def request(name: str, ids: np.ndarray) -> PrefillRequest:
    return PrefillRequest(token_ids=ids, name=name, codec="q8")


def test_another_name_takes_the_measured_quality_over(store: Store, llm: LoadedModel) -> None:
    first = Prefiller(store, llm).run(request("one", IDS[0]))
    assert first.quality is not None
    second = Prefiller(store, llm).run(request("two", IDS[0]))
    assert (second.prefilled_tokens, second.quality) == (0, first.quality)
    assert store.manifest("two").quality == first.quality


def test_each_manifest_is_read_once(
    store: Store, llm: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller = Prefiller(store, llm)
    for name, ids in zip("abc", IDS, strict=True):
        prefiller.run(request(name, ids))
    records, read = Records(store), []
    manifest = Store.manifest
    monkeypatch.setattr(
        Store, "manifest", lambda self, name: read.append(name) or manifest(self, name)
    )
    matches = [store.match(llm.fingerprint, ids) for ids in IDS]
    found = [records.of(match, "new") for match in matches]
    assert [one and one.name for one in found] == ["a", "b", "c"]
    # Its own name and the one that was found for each; all of them once, the first time.
    assert sorted(read) == ["a", "a", "b", "b", "c", "c", "new", "new", "new"]
    read.clear()
    store.write_manifest(replace(manifest(store, "a"), name="d", chain=manifest(store, "b").chain))
    assert records.of(matches[0], "new").name == "a"
    assert sorted(read) == ["a", "d", "new"]


def test_one_that_was_removed_or_replaced_counts_as_what_it_is_now(
    store: Store, llm: LoadedModel
) -> None:
    for name, ids in zip("ab", IDS, strict=False):
        Prefiller(store, llm).run(request(name, ids))
    first, second = (store.match(llm.fingerprint, ids) for ids in IDS[:2])
    records = Records(store)
    assert records.of(first, "new").name == "a"
    store.write_manifest(replace(store.manifest("b"), name="a"))
    store.remove_manifest("b")
    assert records.of(first, "new") is None
    assert records.of(second, "new").name == "a"


def test_one_that_knows_the_quality_goes_first(store: Store, llm: LoadedModel) -> None:
    Prefiller(store, llm).run(request("b", IDS[0]))
    known = store.manifest("b")
    for name in "ac":
        store.write_manifest(replace(known, name=name, quality=None))
    match = store.match(llm.fingerprint, IDS[0])
    assert Records(store).of(match, "c").name == "b"
    store.remove_manifest("b")
    assert Records(store).of(match, "c").name == "c"
