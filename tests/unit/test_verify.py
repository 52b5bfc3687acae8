"""A check finds what is wrong with a store, says what to do, and puts aside only when asked."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dummystore import (
    KV_ONLY,
    RECURRENT,
    WINDOWED,
    blocks_of,
    files_in,
    manifest_of,
    publish,
    rows_of,
    save,
    save_cache,
)

from kvq.errors import DamagedFile, StoreUnavailable
from kvq.store import Store
from kvq.store.keys import as_ids
from kvq.store.layout import block_path
from kvq.store.verify import Finding, Severity, VerifyReport, checker, verify
from kvq.store.verify import blocks as blocks_module

DAY = 86400.0
TEXT = np.random.default_rng(9).integers(0, 100_000, 2000).astype(np.uint32)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def errors(report: VerifyReport) -> list[Finding]:
    return [one for one in report.findings if one.severity is Severity.ERROR]


def said(report: VerifyReport) -> str:
    return "\n".join(f"{one.severity} {one.path}: {one.what}" for one in report.findings)


def relative(store: Store, path: Path) -> str:
    return str(path.relative_to(store.path))


def flip(path: Path, position: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def test_a_sound_store(store):
    for number, space in enumerate((KV_ONLY, WINDOWED, RECURRENT)):
        space = replace(space, fingerprint=f"{number}" * 40)
        save_cache(store, space, f"c{number}", TEXT[:900], kept=(100, 300))
    seen: list[tuple[int, int]] = []
    report = verify(store, on_progress=lambda files, nbytes: seen.append((files, nbytes)))
    assert report.findings == ()
    assert report.ok
    blocks = [path for path in files_in(store.path) if path.suffix == ".safetensors"]
    assert (report.files, report.caches) == (len(blocks), 3)
    assert seen[-1] == (report.files, report.nbytes)
    assert report.nbytes > 0
    assert verify(store, deep=False).nbytes == 0
    assert json.loads(json.dumps(report.as_json()))["ok"] is True


def test_an_empty_store(store):
    assert verify(store).findings == ()


def test_every_kind_of_damage_is_found_and_put_aside_when_asked(store):
    save_cache(store, WINDOWED, "it", TEXT[:900])
    save_cache(store, WINDOWED, "other", TEXT[1000:1300])
    bad = [block_path(store.space_folder(WINDOWED), blocks_of(TEXT[:900])[1][0])]
    bad.append(
        next(path for path in store.path.rglob("*.window.*") if path.parent != bad[0].parent)
    )
    bad.append(next(store.path.rglob("*.logits.*")))
    flip(bad[0], 100)
    flip(bad[1])
    bad[2].write_bytes(bad[2].read_bytes()[:-1])
    before = {path: path.read_bytes() for path in files_in(store.path)}
    report = verify(store)
    assert {path: path.read_bytes() for path in files_in(store.path)} == before
    named = {one.path: one for one in errors(report)}
    for path in bad:
        found = named[relative(store, path)]
        assert not found.repaired
        assert "--repair" in found.advice
    assert any(one.path == "caches/it.json" for one in errors(report))
    again = verify(store, repair=True)
    assert all(named[relative(store, path)].repaired is False for path in bad)
    assert {one.path for one in again.findings if one.repaired} == {
        relative(store, path) for path in bad
    }
    assert not any(path.exists() for path in bad)
    last = verify(store)
    assert all(one.path.startswith("caches/") for one in errors(last))
    assert sum(one.path.startswith("quarantine/") for one in last.findings) == 3


def test_only_a_deep_check_reads_tensors(store):
    saved = save(store, KV_ONLY, TEXT[:300])
    flip(saved[0].path)
    assert verify(store, deep=False).ok
    assert not verify(store).ok


@pytest.mark.parametrize("wrong", ["place", "tokens", "space", "first", "record"])
def test_a_file_that_is_not_what_its_name_says(store, wrong):
    save(store, KV_ONLY, TEXT[:900])
    folder = store.space_folder(KV_ONLY)
    (first, _), (block, start), *_ = blocks_of(TEXT[:900])
    path = block_path(folder, block)
    ids = TEXT.copy()
    if wrong == "place":
        path.write_bytes(block_path(folder, first).read_bytes())
    elif wrong == "tokens":
        ids[300] += 1
        publish(path, KV_ONLY, block, ids, start, "kv", rows_of(ids[256:512]))
    elif wrong == "space":
        other = replace(KV_ONLY, codec="q8")
        publish(path, other, block, ids, start, "kv", rows_of(ids[256:512]))
    elif wrong == "first":
        code = "a" if block.first[0] != "a" else "b"
        path.rename(path.with_name(replace(block, first=code + block.first[1:]).file()))
    else:
        publish(path, KV_ONLY, block, ids, start, "window", rows_of(ids[256:512]))
    found = errors(verify(store))
    assert [one.what for one in found] == ["the header does not belong to the file's name"]


def test_blocks_that_start_elsewhere_than_the_one_before_ends(store):
    save(store, KV_ONLY, TEXT[:512])
    block, _ = blocks_of(TEXT[:512])[1]
    ids = np.concatenate([TEXT[:256], TEXT])
    path = block_path(store.space_folder(KV_ONLY), block)
    publish(path, KV_ONLY, block, ids, 512, "kv", rows_of(TEXT[256:512]))
    report = verify_later(store)
    assert "its blocks say 512 tokens, the block before 256" in said(report)


def test_blocks_behind_a_gap(store):
    manifest = save_cache(store, KV_ONLY, "it", TEXT[:900])
    block_path(store.space_folder(KV_ONLY), manifest.blocks()[1]).unlink()
    report = verify(store)
    assert [one.what for one in errors(report)] == [
        "the block after token 256 is missing or damaged"
    ]
    assert "no sound full block leads here" not in said(report), "it may just be written"
    assert "no sound full block leads here" in said(verify_later(store))


def test_a_cache_whose_records_are_missing(store):
    save_cache(store, RECURRENT, "it", TEXT[:900], kept=(300,))
    next(store.path.rglob("*.logits.*")).unlink()
    branch = blocks_of(TEXT[:300])[-1][0]
    block_path(store.space_folder(RECURRENT), branch, "state").unlink()
    report = verify(store)
    assert [one.what for one in errors(report)] == [
        "it cannot be restored at token 300, which it says was kept"
    ]
    assert "warning caches/it.json: the logits after its last token are missing" in said(report)
    tail = blocks_of(TEXT[:900])[-1][0]
    block_path(store.space_folder(RECURRENT), tail, "state").unlink()
    assert "only 0 of its 900 tokens can be restored" in said(verify(store))


def test_manifests_that_do_not_add_up(store):
    good = save_cache(store, KV_ONLY, "good", TEXT[:900])
    store.write_manifest(replace(good, name="short", chain=good.chain[:2]))
    store.write_manifest(replace(good, name="elsewhere", space="0" * 40))
    store.write_manifest(replace(good, name="lies", codec="q4"))
    (store.path / "caches" / "copy.json").write_bytes(good.encode())
    (store.path / "caches" / "bad.json").write_text("{}")
    report = verify(store, repair=True)
    found = {one.path: one for one in report.findings}
    assert found["caches/short.json"].what == "its blocks hold 512 tokens, not 900"
    assert found["caches/elsewhere.json"].what.endswith("is not there")
    assert "q4" in found["caches/lies.json"].what
    assert found["caches/copy.json"].severity is Severity.WARNING
    assert found["caches/bad.json"].repaired
    assert "good" in store.names()
    assert "caches/good.json" not in found
    assert "bad" not in store.names()


def test_newer_files_are_not_errors(store, monkeypatch):
    manifest = save_cache(store, KV_ONLY, "it", TEXT[:300])
    data = manifest.encode().replace(b'"format": 1', b'"format": 9')
    (store.path / "caches" / "newer.json").write_bytes(data)
    report = verify(store)
    assert report.ok
    assert "warning caches/newer.json: a newer format" in said(report)
    monkeypatch.setattr("kvq.store.blockfile.FORMAT", 0)
    report = verify(store, repair=True)
    assert report.ok
    assert not any(one.repaired for one in report.findings)


def test_spaces_that_cannot_be_read(store):
    save(store, KV_ONLY, TEXT[:300])
    path = store.space_folder(KV_ONLY) / "space.json"
    data = path.read_bytes()
    path.write_text("{}")
    assert not verify(store).ok
    path.write_bytes(data.replace(b"float32", b"float16"))
    assert "it describes another space" in said(verify(store, repair=True))
    assert not path.exists()
    report = verify(store)
    assert "missing, so that none of the space's blocks can be found" in said(report)
    store.add_space(KV_ONLY)
    assert verify(store).ok


def test_what_is_left_over_is_noted_once_it_is_old(store):
    save_cache(store, RECURRENT, "it", TEXT[:300])
    save(store, RECURRENT, TEXT[1000:1300])
    folder = store.space_folder(RECURRENT)
    block, _ = blocks_of(TEXT[:300])[0]
    block_path(folder, block, "state", ckpt=True).write_bytes(
        block_path(folder, blocks_of(TEXT[:300])[1][0], "state").read_bytes()
    )
    node = block_path(folder, block).parent
    (node / ".tmp-1-a.safetensors").write_bytes(b"")
    (store.path / ".tmp-1-b.json").write_bytes(b"")
    (node / "Thumbs.db").write_bytes(b"")
    first = verify(store, deep=False)
    assert {one.what for one in first.findings if one.severity is not Severity.ERROR} == {
        "not a file of kvq's"
    }
    # A change of a file's time is itself noted by the file system, so look from later on.
    later = verify_later(store)
    assert {one.what for one in later.findings if one.severity is Severity.NOTE} == {
        "not a file of kvq's",
        "left by a process that was killed",
        "a checkpoint of a job that has ended",
        "4 files, " + orphan_size(later) + ", of blocks that no cache names",
    }


def verify_later(store: Store) -> VerifyReport:
    with pytest.MonkeyPatch.context() as patch:
        now = time.time()
        patch.setattr("kvq.store.verify.checker.time.time", lambda: now + DAY)
        return verify(store, deep=False)


def orphan_size(report: VerifyReport) -> str:
    (what,) = [one.what for one in report.findings if "no cache names" in one.what]
    return what.split(", ")[1]


def test_records_without_their_block(store):
    saved = save(store, WINDOWED, TEXT[:100])
    saved[0].path.unlink()
    assert "without its rows" in said(verify_later(store))


def test_quarantine_is_told_with_its_reasons(store):
    saved = save(store, KV_ONLY, TEXT[:300])
    store.quarantine(DamagedFile(str(saved[0].path), "it was Tuesday"))
    (store.path / "quarantine" / "loose").write_bytes(b"x")
    report = verify(store)
    assert f"put aside from {relative(store, saved[0].path)}: it was Tuesday" in said(report)
    assert "put aside, nobody knows why" in said(report)


def test_files_that_come_and_go_are_no_findings(store, monkeypatch):
    """Everything is swept after it was listed."""
    save(store, KV_ONLY, TEXT[:900])
    read_header = blocks_module.read_header

    def swept(path: Path):
        path.unlink()
        return read_header(path)

    monkeypatch.setattr(blocks_module, "read_header", swept)
    assert verify(store).findings == ()


def test_a_cache_forgotten_meanwhile_is_no_finding(store, monkeypatch):
    save_cache(store, KV_ONLY, "it", TEXT[:300])
    real = checker.faults

    def forgotten(*args: object):
        for path in store.path.rglob("*.safetensors"):
            path.unlink()
        found = list(real(*args))
        store.remove_manifest("it")
        return found

    monkeypatch.setattr(checker, "faults", forgotten)
    assert verify(store).findings == ()


def test_a_file_that_cannot_be_read(store, monkeypatch):
    save_cache(store, KV_ONLY, "it", TEXT[:300])

    def broken(header: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(blocks_module, "check_data", broken)
    report = verify(store, repair=True)
    assert {one.what for one in errors(report)} == {"cannot be read: Input/output error"}
    assert not any(one.repaired for one in report.findings)


def test_a_store_that_is_not_there(store):
    os.unlink(store.path / "kvq-store.json")
    with pytest.raises(StoreUnavailable):
        verify(store)


def test_it_agrees_with_what_a_reader_gets(store):
    """Without findings, every cache is an exact match; without its logits it is not."""
    ids = as_ids(TEXT[:700])
    save(store, WINDOWED, ids)
    store.write_manifest(manifest_of(store, WINDOWED, "it", ids))
    assert verify(store).ok
    assert store.match(WINDOWED.fingerprint, ids).exact
    next(store.path.rglob("*.logits.*")).unlink()
    assert verify(store).findings
    assert not store.match(WINDOWED.fingerprint, ids).exact
