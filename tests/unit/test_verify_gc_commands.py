"""`kvq verify` and `kvq gc` as commands, and replays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from dummystore import KV, STATE, make_space, save_cache
from tinymodel import tiny_model

from kvq.cache.replay import Replay, replay
from kvq.errors import DamagedFile, UsageError
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


def test_a_settling_time_is_needed_on_shares_only(store, monkeypatch, capsys):
    from kvq_producer.doctor import mounts

    slept: list[float] = []
    monkeypatch.setattr("kvq.store.gc.sweep.time.sleep", slept.append)
    for kind in ("nfs4", "ext4"):
        mount = mounts.Mount(point=store.path, kind=kind, options="rw")
        monkeypatch.setattr(mounts, "mount_of", lambda path, mount=mount: mount)
        names = store.names()
        store.remove_manifest(names[0])
        assert run(["gc", "--store", str(store.path), "--grace", "0s", "--yes"]) == 0
        assert "let nothing write" in capsys.readouterr().err
    assert slept == [60.0]
    assert blocks(store) == []


def test_a_quota_that_cannot_be_met_is_said(store, capsys):
    store.write_manifest(replace(store.manifest("one"), pinned=True))
    arguments = ["gc", "--store", str(store.path), "--grace", "0s", "--max-bytes", "10", "--yes"]
    assert run(arguments) == 1
    said = capsys.readouterr()
    assert "still" in said.err
    assert "two: quota, frees" in said.out
    assert store.names() == ["one"]
    assert run([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["over_quota"] > 0
    assert not found["complete"]


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
    next(path for path in blocks(store) if ".256." in path.name).unlink()
    with pytest.raises(DamagedFile, match="after token 0 is missing"):
        replay(store, llm, "one")


def test_only_an_exact_codec_has_to_give_the_same_tokens():
    facts = {"name": "it", "prompt": 9, "reused": 9, "resumed": (1,), "cold": (2,)}
    assert not Replay(codec="raw", **facts).sound
    assert Replay(codec="q4", **facts).sound
    assert Replay(codec="raw", **facts | {"cold": (1,)}).sound
