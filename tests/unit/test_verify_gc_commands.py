"""`kvq verify` and `kvq gc` as commands, and replays."""

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
from kvq.store.verify import verify
from kvq_producer.cli import run
from kvq_producer.commands.gc import gc
from kvq_producer.commands.verify import verify as verify_command


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(tmp_path / "store")
    space = make_space(KV, STATE)
    store.add_space(space)
    save_cache(store, space, "one", list(range(600)))
    save_cache(store, space, "two", [*range(300), 7, 8])
    return store


def blocks(store: Store) -> list[Path]:
    return sorted(store.path.rglob("nodes/**/*.safetensors"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_command_says_so_and_exits_1(store: Store) -> None:
    runner = CliRunner()
    calm = runner.invoke(verify_command, ["--store", str(store.path)], standalone_mode=False)
    assert calm.return_value == 0
    assert calm.output.startswith("2 caches, ")
    assert calm.output.endswith("all is sound\n")
    flip(blocks(store)[0], -1)
    arguments = ["--store", str(store.path), "--json"]
    told = runner.invoke(verify_command, arguments, standalone_mode=False)
    assert told.return_value == 1
    assert json.loads(told.output)["findings"][0]["severity"] == "error"
    quick = runner.invoke(verify_command, [*arguments, "--quick"], standalone_mode=False)
    assert quick.return_value == 0


def test_repair_puts_a_damaged_file_aside(store: Store) -> None:
    damaged = blocks(store)[0]
    flip(damaged, -1)
    arguments = ["--store", str(store.path), "--repair"]
    assert CliRunner().invoke(verify_command, arguments, standalone_mode=False).return_value == 1
    assert not damaged.exists()
    assert len(list((store.path / "quarantine").glob("*.safetensors"))) == 1


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
    assert verify(store).findings == ()


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
