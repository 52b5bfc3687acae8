"""A prefill beside a sweep, and prompts that want positions which earlier ones did not keep."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from oracle import as_loaded
from zoo import by_name, prompt

from kvq.errors import StoreUnavailable
from kvq.prefill import Prefiller, PrefillRequest
from kvq.prefill import prefiller as prefiller_module
from kvq.store import Match, Store
from kvq.store.gc import Policy, collect
from kvq.store.keys import as_ids

KEPT = ["gemma3_text", "qwen3_next", "falcon_h1"]


def make(tmp_path: Path, name: str = "llama-16") -> Prefiller:
    return Prefiller(Store.create(tmp_path / "store"), as_loaded(by_name(name)), step=128)


def ask(prefiller: Prefiller, ids: np.ndarray, name: str | None = "it", **options: object):
    request = PrefillRequest(token_ids=ids, name=name, **{"codec": "raw", **options})
    return prefiller.run(request)


def match_of(prefiller: Prefiller, ids: np.ndarray) -> Match:
    return prefiller.store.match(prefiller.llm.fingerprint, ids)


@pytest.mark.parametrize("name", KEPT)
def test_a_position_that_an_earlier_prompt_did_not_keep_is_kept_now(tmp_path, name):
    prefiller = make(tmp_path, name)
    ids = as_ids(prompt(by_name(name), 1400))
    ask(prefiller, ids, "first")
    assert match_of(prefiller, ids).plan_upto(700).tokens < 700
    done = ask(prefiller, ids, "second", keep=(700,))
    assert done.reused_tokens < 700
    match = match_of(prefiller, ids)
    assert match.exact
    assert match.plan_at(700).tokens == 700
    assert ask(prefiller, ids, "third", keep=(700,)).prefilled_tokens == 0


@pytest.mark.parametrize("name", KEPT)
def test_a_manifest_reaches_all_that_its_kept_positions_need(tmp_path, name):
    """Only what the manifest names is left: each kept position can still be restored."""
    prefiller = make(tmp_path, name)
    ids = as_ids(prompt(by_name(name), 1400))
    ask(prefiller, ids, keep=(100, 700))
    manifest = prefiller.store.manifest("it")
    named = {block.stem for block in manifest.blocks()}
    for path in prefiller.store.path.rglob("*.safetensors"):
        if ".".join(path.name.split(".")[:3]) not in named:
            path.unlink()
    match = match_of(prefiller, ids)
    for position in manifest.kept:
        assert match.plan_at(position).tokens == position
    assert bool(manifest.branches) == (name != "gemma3_text")


def test_what_a_prefill_relies_on_is_marked_as_in_use(tmp_path):
    prefiller = make(tmp_path)
    ids = as_ids(prompt(by_name("llama-16"), 600))
    ask(prefiller, ids[:512], None)
    for path in prefiller.store.path.rglob("*.safetensors"):
        os.utime(path, (0, 0))
    ask(prefiller, ids)
    for path in prefiller.store.path.rglob("*.safetensors"):
        assert path.stat().st_mtime > 0


def sweep_before_publishing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[Path]:
    """Right before the manifest is written, a sweep takes the first block; so often."""
    taken: list[Path] = []
    publish = prefiller_module.publish

    def swept(store, llm, request, match, outcome):
        if len(taken) < times:
            path = match.plan.kv[0].header.path
            path.unlink()
            taken.append(path)
        return publish(store, llm, request, match, outcome)

    monkeypatch.setattr(prefiller_module, "publish", swept)
    return taken


def test_a_block_lost_right_before_the_manifest_is_computed_again(tmp_path, monkeypatch):
    prefiller = make(tmp_path)
    ids = as_ids(prompt(by_name("llama-16"), 600))
    taken = sweep_before_publishing(monkeypatch, 1)
    ask(prefiller, ids)
    assert taken[0].exists()
    assert match_of(prefiller, ids).exact
    assert prefiller.store.names() == ["it"]


def test_there_is_no_manifest_of_blocks_that_keep_vanishing(tmp_path, monkeypatch):
    prefiller = make(tmp_path)
    ids = as_ids(prompt(by_name("llama-16"), 600))
    sweep_before_publishing(monkeypatch, 100)
    with pytest.raises(StoreUnavailable, match="grace period"):
        ask(prefiller, ids)
    assert prefiller.store.names() == []


@pytest.mark.parametrize("name", ["llama-16", *KEPT])
def test_a_sweep_leaves_the_blocks_that_a_prefill_goes_on_from(tmp_path, name):
    prefiller = make(tmp_path, name)
    store, ids = prefiller.store, as_ids(prompt(by_name(name), 1400))
    ask(prefiller, ids[:700], "old")
    store.remove_manifest("old")
    for path in store.path.rglob("*.safetensors"):
        os.utime(path, (0, 0))
    calls = []

    def sweep(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 3:
            collect(store, Policy(grace=3600.0, settle=0))

    request = PrefillRequest(token_ids=ids, name="it", codec="raw")
    outcome = prefiller.run(request, on_chunk=sweep)
    assert len(calls) > 3
    assert outcome.reused_tokens > 0
    assert match_of(prefiller, ids).exact


@pytest.mark.parametrize("name", KEPT)
def test_no_manifest_keeps_a_position_whose_files_are_gone(tmp_path, name, monkeypatch):
    """Each file of a stored prompt in turn is lost right before the manifest: it is made again."""
    prefiller = make(tmp_path, name)
    store, ids = prefiller.store, as_ids(prompt(by_name(name), 1400))
    ask(prefiller, ids, "old", keep=(100, 700))
    publish = Prefiller._publish
    for path in sorted(store.path.glob("spaces/**/*.safetensors")):
        store.remove_manifest(store.names()[0])
        lost = [path]

        def without(*args, lost=lost):
            if lost:
                lost.pop().unlink()
            return publish(*args)

        monkeypatch.setattr(Prefiller, "_publish", without)
        ask(prefiller, ids, path.name.split(".")[0], keep=(100, 700))
        (manifest,) = store.manifests()
        match = match_of(prefiller, ids)
        assert match.exact, path
        assert [match.plan_upto(at).tokens for at in manifest.kept] == list(manifest.kept), path
