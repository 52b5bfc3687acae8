"""`verify`: whatever is wrong is found, and nothing is found where all is well."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from dummystore import KV, STATE, make_space, save_cache
from tinymodel import tiny_model

from kvq.cache.replay import replay
from kvq.errors import UsageError
from kvq.model.loading import load
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store
from kvq.store.layout import manifest_path
from kvq.store.verify import Fault, verify
from kvq_producer.cli import run
from kvq_producer.commands.gc import gc
from kvq_producer.commands.verify import verify as verify_command


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(tmp_path / "store")
    space = make_space(KV, STATE)
    save_cache(store, space, "one", list(range(600)))
    save_cache(store, space, "two", [*range(300), 7, 8])
    return store


def blocks(store: Store, pattern: str = "*.safetensors") -> list[Path]:
    return sorted(store.path.rglob(f"nodes/**/{pattern}"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_whole_store_has_no_findings(store: Store) -> None:
    report = verify(store)
    assert report.findings == []
    assert report.ok
    assert report.caches == 2
    assert report.files == len(blocks(store))
    assert report.nbytes == sum(path.stat().st_size for path in blocks(store))
    assert (report.orphans, report.leftovers, report.quarantined) == (0, 0, 0)


@pytest.mark.parametrize("at", [3, 40, -1])
def test_a_flipped_byte_is_found_and_put_aside_when_asked(store: Store, at: int) -> None:
    path = next(one for one in blocks(store) if one.name.count(".") == 3)
    flip(path, at)
    (damaged, *others) = verify(store).findings
    assert (damaged.fault, damaged.path, damaged.moved) == (Fault.DAMAGED, str(path), False)
    assert {one.fault for one in others} == {Fault.INCOMPLETE}
    assert path.exists()
    assert any(one.moved for one in verify(store, repair=True).findings)
    assert not path.exists()
    after = verify(store)
    assert {one.fault for one in after.findings} == {Fault.INCOMPLETE}
    assert after.quarantined == 1


def test_a_quick_look_reads_no_tensors(store: Store) -> None:
    flip(blocks(store)[0], -1)
    assert verify(store, deep=False).ok
    assert not verify(store).ok


def test_a_file_under_another_blocks_name_is_found(store: Store) -> None:
    rows = [one for one in blocks(store) if ".256." in one.name and "state" not in one.name]
    first, second = rows[:2]
    first.write_bytes(second.read_bytes())
    assert Fault.DAMAGED in {one.fault for one in verify(store).findings}


def test_missing_blocks_and_bad_manifests_are_named(store: Store) -> None:
    last = next(one for one in blocks(store) if ".88." in one.name and one.name.count(".") == 3)
    last.unlink()
    flip(manifest_path(store.path, "two"), 30)
    found = {one.fault: one for one in verify(store).findings}
    assert found[Fault.INCOMPLETE].path == "one"
    assert found[Fault.INCOMPLETE].what == "1 block of 3 are missing or damaged"
    assert found[Fault.MANIFEST].path == "two"


def test_forgotten_blocks_are_orphans_and_no_fault(store: Store) -> None:
    store.remove_manifest("two")
    report = verify(store)
    assert report.ok
    assert report.orphans == 1


def test_the_command_says_so_and_exits_1(store: Store) -> None:
    runner = CliRunner()
    calm = runner.invoke(verify_command, ["--store", str(store.path)], standalone_mode=False)
    assert calm.return_value == 0
    assert "2 caches" in calm.output
    assert "all hold" in calm.output
    flip(blocks(store)[0], -1)
    told = runner.invoke(
        verify_command, ["--store", str(store.path), "--json"], standalone_mode=False
    )
    assert told.return_value == 1
    assert json.loads(told.output)["findings"][0]["fault"] == "damaged"


def test_collecting_is_a_dry_run_until_it_is_allowed(store: Store) -> None:
    store.remove_manifest("two")
    runner = CliRunner()
    arguments = ["--store", str(store.path), "--grace", "0s", "--settle", "0s"]
    before = blocks(store)
    dry = runner.invoke(gc, arguments, standalone_mode=False)
    assert "would be freed" in dry.output
    assert blocks(store) == before
    done = runner.invoke(gc, [*arguments, "--yes"], standalone_mode=False)
    assert done.return_value == 0
    assert len(blocks(store)) < len(before)
    assert verify(store).ok
    assert verify(store).orphans == 0


def test_a_replay_proves_that_a_cache_resumes_alike(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    store, llm = Store.create(tmp_path / "store"), load(str(model))
    ids = np.arange(10, 400, dtype=np.uint32) % 250
    Prefiller(store, llm).run(PrefillRequest(token_ids=ids, name="one", codec="raw"))
    found = replay(store, llm, "one", tokens=6)
    assert found.same
    assert (found.prompt, found.reused, len(found.cold)) == (390, 390, 6)
    status = run(["verify", "--store", str(store.path), "--replay", "one", "--model", str(model)])
    assert status == 0
    with pytest.raises(UsageError, match="another model"):
        replay(store, load(str(tiny_model(tmp_path / "other", seed=1))), "one")
