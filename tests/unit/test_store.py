"""Making, opening and listing stores, and what happens when another disk is in a store's place."""

from __future__ import annotations

import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dummystore import KV, KV_ONLY, blocks_of, make_space, save, save_cache

from kvq.errors import (
    CacheNotFound,
    DamagedFile,
    InvalidName,
    StoreNotFound,
    StoreUnavailable,
    UnsupportedFormat,
)
from kvq.store import End, Manifest, Store
from kvq.store import disk as disk_module
from kvq.store import store as store_module

IDS = np.arange(300, dtype=np.uint32)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def test_a_new_store_says_what_it_is(store):
    facts = json.loads((store.path / "kvq-store.json").read_bytes())
    assert facts == {"format": 1, "block": 256, "id": store.id}
    assert Store(store.path).id == store.id


def test_creating_twice_opens(store):
    assert Store.create(store.path).id == store.id


def test_files_are_for_their_owner_only(store):
    save_cache(store, KV_ONLY, "mine", IDS)
    for path in store.path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_store_can_be_opened_to_a_group(tmp_path):
    """The mark is the set-group-ID bit of its folder; the umask does not matter."""
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o2770)
    before = os.umask(0o077)
    try:
        store = Store.create(folder)
        save_cache(store, KV_ONLY, "ours", IDS)
    finally:
        os.umask(before)
    for path in store.path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o2770 if path.is_dir() else 0o660), path


def test_a_folder_that_others_may_enter_does_not_open_a_store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o755)
    save_cache(Store.create(folder), KV_ONLY, "mine", IDS)
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_path_may_start_at_home_or_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.create("~/kv").path == tmp_path / "kv"
    monkeypatch.chdir(tmp_path)
    assert Store("kv").path == tmp_path / "kv"


def test_what_is_no_store_is_not_opened(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(StoreNotFound, match="Is the share mounted"):
            Store(path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StoreNotFound):
        Store(file)
    with pytest.raises(StoreUnavailable):
        Store.create(file)


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreNotFound, match="not empty"):
        Store.create(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("name", ["lost+found", ".Trashes", "@eaDir", "System Volume Information"])
def test_what_file_systems_put_into_an_empty_disk_is_no_obstacle(tmp_path, name):
    (tmp_path / name).mkdir()
    assert Store.create(tmp_path).id


def test_two_creators_get_one_store(tmp_path, monkeypatch):
    """Both have seen an empty folder before either writes."""
    barrier = threading.Barrier(2)
    publish = store_module.publish

    def after_both_looked(*args: object, **how: object) -> int:
        barrier.wait(timeout=20)
        return publish(*args, **how)

    monkeypatch.setattr(store_module, "publish", after_both_looked)
    stores: list[Store] = []
    threads = [
        threading.Thread(target=lambda: stores.append(Store.create(tmp_path / "store")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 2
    assert stores[0].id == stores[1].id
    for one in stores:
        one.check()
    assert os.listdir(tmp_path / "store") == ["kvq-store.json"]


def test_a_file_system_without_hard_links_will_do(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = Store.create(tmp_path / "store")
    manifest = save_cache(store, KV_ONLY, "it", IDS)
    with pytest.raises(StoreUnavailable) as caught:
        store.write_manifest(manifest, exclusive=True)
    assert isinstance(caught.value.__cause__, FileExistsError)
    store.write_manifest(replace(manifest, name="other"), exclusive=True)
    assert store.names() == ["it", "other"]


def test_a_newer_store_is_not_guessed_at(store):
    facts = {"format": 2, "block": 256, "id": "x"}
    (store.path / "kvq-store.json").write_text(json.dumps(facts))
    with pytest.raises(UnsupportedFormat, match="upgrade kvq"):
        Store(store.path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "1", "block": 256, "id": 1}', "[" * 9999]
)
def test_a_damaged_store_file_is_named(store, text):
    (store.path / "kvq-store.json").write_text(text)
    with pytest.raises(DamagedFile, match=r"kvq-store\.json"):
        Store(store.path)


def test_another_disk_in_the_stores_place_is_noticed(store, tmp_path):
    other = Store.create(tmp_path / "other")
    (other.path / "kvq-store.json").rename(store.path / "kvq-store.json")
    with pytest.raises(StoreUnavailable, match="another store is mounted"):
        store.check()
    with pytest.raises(StoreUnavailable, match="another store is mounted"):
        store.write_manifest(manifest_without_blocks())
    with pytest.raises(StoreUnavailable, match="another store is mounted"):
        store.add_space(KV_ONLY)


def test_an_unmounted_share_is_not_an_empty_store(store):
    (store.path / "kvq-store.json").unlink()
    with pytest.raises(StoreUnavailable):
        store.match("f" * 40, IDS)
    with pytest.raises(StoreUnavailable):
        store.write_manifest(manifest_without_blocks())


def manifest_without_blocks() -> Manifest:
    return Manifest(
        name="it",
        space=KV_ONLY.digest,
        fingerprint=KV_ONLY.fingerprint,
        model="dummy",
        codec="raw",
        dtype="float32",
        tokens=len(IDS),
        chain=tuple(block.stem for block, _ in blocks_of(IDS)),
        kept=(len(IDS),),
        nbytes=0,
        created=0.0,
    )


def test_a_miss_says_why(store):
    assert store.match("f" * 40, IDS).reason.end is End.NO_SPACE
    save(store, make_space(KV, fingerprint="a" * 40), IDS)
    match = store.match("f" * 40, IDS)
    assert (match.tokens, match.reason.end) == (0, End.OTHER_MODEL)
    save(store, KV_ONLY, IDS)
    match = store.match("f" * 40, IDS, codecs=["q8"])
    assert match.reason.end is End.NO_SPACE
    assert "raw" in match.reason.message


def test_why_a_match_ends(store):
    save(store, KV_ONLY, IDS)
    reason = store.match("f" * 40, IDS[:200]).reason
    assert (reason.end, reason.position) == (End.COMPLETE, 200)
    reason = store.match("f" * 40, np.append(IDS, 7)).reason
    assert (reason.end, reason.position) == (End.STORED_ENDS, 300)
    differs = IDS.copy()
    differs[280] = 9
    reason = store.match("f" * 40, differs).reason
    assert (reason.end, reason.position) == (End.DIVERGED, 280)
    assert (reason.stored, reason.asked) == (280, 9)


def test_the_more_exact_codec_wins_a_tie_and_the_longer_match_otherwise(store):
    lossy = make_space(KV, codec="q8")
    save(store, KV_ONLY, IDS)
    save(store, lossy, IDS)
    assert store.match("f" * 40, IDS).space.codec == "raw"
    longer = np.arange(500, dtype=np.uint32)
    save(store, lossy, longer)
    match = store.match("f" * 40, longer)
    assert match.space.codec == "q8"
    assert match.spaces == (("q8", 500), ("raw", 300))


def test_blocks_of_another_space_never_count(store):
    """Files copied to where they do not belong: same tokens, same key, other numbers."""
    save(store, KV_ONLY, IDS)
    lossy = make_space(KV, codec="q8")
    folder = store.add_space(lossy)
    os.rename(store.space_folder(KV_ONLY) / "nodes", folder / "nodes")
    match = store.match("f" * 40, IDS, codecs=["q8"])
    assert (match.tokens, match.reason.end) == (0, End.DAMAGED)


def test_unreadable_spaces_are_left_out(store):
    save(store, KV_ONLY, IDS)
    for text in ("", "{}", "[" * 9999):
        (store.space_folder(KV_ONLY) / "space.json").write_text(text)
        assert store.spaces() == []
    moved = store.path / "spaces" / ("0" * 40)
    (store.space_folder(KV_ONLY) / "space.json").write_text(json.dumps(KV_ONLY.as_json()))
    store.space_folder(KV_ONLY).rename(moved)
    assert store.spaces() == []


def test_manifests_by_name(store):
    kept = [save_cache(store, KV_ONLY, name, IDS) for name in ("b", "a.2", "A")]
    assert store.names() == ["A", "a.2", "b"]
    assert [one.name for one in store.manifests()] == store.names()
    assert store.manifest("b") == kept[0]
    store.remove_manifest("b")
    for attempt in (store.manifest, store.remove_manifest):
        with pytest.raises(CacheNotFound, match="'b'"):
            attempt("b")
        with pytest.raises(InvalidName):
            attempt("../kvq-store")


def test_foreign_and_damaged_files_do_not_end_a_listing(store):
    save_cache(store, KV_ONLY, "good", IDS)
    caches = store.path / "caches"
    (caches / "good copy.json").write_bytes((caches / "good.json").read_bytes())
    (caches / ".tmp-1-2.json").touch()
    (caches / "notes.txt").touch()
    (caches / "bad.json").write_text("{}")
    assert store.names() == ["bad", "good"]
    assert [one.name for one in store.manifests()] == ["good"]
    with pytest.raises(DamagedFile):
        store.manifest("bad")


def test_a_manifest_can_be_written_only_where_none_is(store):
    manifest = save_cache(store, KV_ONLY, "it", IDS)
    with pytest.raises(StoreUnavailable) as caught:
        store.write_manifest(replace(manifest, tokens=1), exclusive=True)
    assert isinstance(caught.value.__cause__, FileExistsError)
    assert store.manifest("it") == manifest
    store.write_manifest(replace(manifest, pinned=True))
    assert store.manifest("it").pinned
    assert os.listdir(store.path / "caches") == ["it.json"]


def test_quarantine_keeps_the_file_and_the_reason(store):
    manifest = save_cache(store, KV_ONLY, "it", IDS)
    path = store.path / "caches" / "it.json"
    assert store.quarantine(DamagedFile(str(path), "a test"))
    assert store.quarantine(DamagedFile(str(path), "a test")), "another has moved it: all the same"
    reason, kept = sorted(os.listdir(store.path / "quarantine"), key=len, reverse=True)
    assert (store.path / "quarantine" / kept).read_bytes() == manifest.encode()
    note = json.loads((store.path / "quarantine" / reason).read_bytes())
    assert note == {"file": "caches/it.json", "reason": "a test"}


def test_quarantine_without_write_access_says_so(store, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    manifest = save_cache(store, KV_ONLY, "it", IDS)
    monkeypatch.setattr(os, "rename", refuse)
    path = store.path / "caches" / "it.json"
    assert not store.quarantine(DamagedFile(str(path), "a test"))
    assert path.read_bytes() == manifest.encode()


def test_nothing_is_left_of_a_file_that_could_not_be_published(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="No space left"):
        disk_module.publish(tmp_path / "x", [b"data"])
    assert os.listdir(tmp_path) == []
