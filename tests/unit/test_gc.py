"""What a sweep takes, what it leaves, and that a late touch is always seen."""

from __future__ import annotations

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
    age,
    blocks_of,
    check_plan,
    files_in,
    make_space,
    manifest_of,
    save,
    save_cache,
    save_steps,
)

from kvq.errors import CacheNotFound, DamagedFile, StoreUnavailable
from kvq.store import Store, lifecycle
from kvq.store.gc import Kind, Policy, Report, aside, collect
from kvq.store.gc import mark as mark_module
from kvq.store.gc import sweep as sweep_module
from kvq.store.hold import hold
from kvq.store.layout import block_path

DAY = 86400.0
NOW = Policy(grace=3600, settle=0)
TEXT = np.random.default_rng(5).integers(0, 100_000, 3000).astype(np.uint32)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def prompt(shared: int, own: int, seed: int) -> np.ndarray:
    """`shared` tokens that all prompts begin with, then `own` of its own."""
    tail = np.random.default_rng(seed).integers(200_000, 300_000, own)
    return np.concatenate([TEXT[:shared], tail]).astype(np.uint32)


def tokens(store: Store, ids: np.ndarray, space=KV_ONLY) -> int:
    match = store.match(space.fingerprint, ids)
    check_plan(match.plan, ids, space)
    return match.tokens


def sweep(store: Store, policy: Policy = NOW, **how: bool) -> Report:
    report = collect(store, policy, **how)
    assert not [p for p in files_in(store.path) if p.name.startswith((".gc-", ".tmp-"))]
    return report


def sizes(store: Store) -> int:
    return sum(path.stat().st_size for path in files_in(store.path / "spaces"))


def test_what_a_manifest_names_stays_however_old(store):
    for number, space in enumerate((KV_ONLY, WINDOWED, RECURRENT)):
        space = replace(space, fingerprint=f"{number}" * 40)
        save_cache(store, space, f"c{number}", TEXT[:900], kept=(100, 300, 700))
    age(store.path, 100 * DAY)
    before = files_in(store.path)
    report = sweep(store)
    assert files_in(store.path) == before
    assert report.freed_bytes == report.put_back == 0
    assert report.kept_caches == 3
    assert report.complete


def test_a_forgotten_cache_goes_and_what_it_shared_stays(store):
    one, two = prompt(600, 300, 1), prompt(600, 300, 2)
    save_cache(store, KV_ONLY, "one", one)
    save_cache(store, KV_ONLY, "two", two)
    age(store.path, DAY)
    store.remove_manifest("one")
    before = sizes(store)
    report = sweep(store)
    assert report.files[Kind.UNREACHABLE].nbytes == before - sizes(store) > 0
    assert tokens(store, two) == 900
    assert tokens(store, one) == 600
    assert report.kept_bytes == sum(
        path.stat().st_size for path in files_in(store.path / "spaces") if "nodes" in path.parts
    )


def test_nothing_younger_than_the_grace_period_goes(store):
    save(store, RECURRENT, TEXT[:900], kept=(300,))
    before = files_in(store.path)
    report = sweep(store)
    assert files_in(store.path) == before
    assert report.young.files == len(before) - 2
    age(store.path, 3601)
    assert sweep(store).files[Kind.UNREACHABLE].files == len(before) - 2
    assert tokens(store, TEXT[:900], RECURRENT) == 0


def test_one_young_record_keeps_its_block(store):
    save(store, WINDOWED, TEXT[:200])
    age(store.path, DAY)
    window = next(store.path.rglob("*.window.*"))
    os.utime(window)
    assert sweep(store).freed_bytes == 0
    assert tokens(store, TEXT[:200], WINDOWED) == 200


def test_blocks_of_kept_positions_inside_others_stay(store):
    """Their states rest in blocks off the chain, which a manifest names as branches."""
    save_cache(store, RECURRENT, "one", TEXT[:900], kept=(300, 700))
    age(store.path, DAY)
    sweep(store)
    match = store.match(RECURRENT.fingerprint, TEXT[:900])
    for position in (300, 700):
        assert match.plan_at(position).tokens == position


def test_empty_directories_go_too(store):
    save(store, KV_ONLY, TEXT[:900])
    age(store.path, DAY)
    sweep(store)
    space = store.space_folder(KV_ONLY)
    assert [path for path in space.rglob("*") if path.is_dir()] == [space / "nodes"]
    assert tokens(store, TEXT[:900]) == 0
    save(store, KV_ONLY, TEXT[:900])
    assert tokens(store, TEXT[:900]) == 900


def test_a_dry_run_changes_nothing_and_says_the_same(store):
    save_cache(store, KV_ONLY, "old", prompt(0, 600, 1), expires=1.0)
    save_cache(store, KV_ONLY, "kept", prompt(0, 600, 2))
    (store.space_folder(KV_ONLY) / ".tmp-1-a.safetensors").write_bytes(b"left")
    age(store.path, DAY)
    before = {path: path.stat().st_mtime_ns for path in files_in(store.path)}
    dry = collect(store, NOW, dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in files_in(store.path)} == before
    real = sweep(store)
    assert (dry.caches, dry.files, dry.kept_bytes) == (real.caches, real.files, real.kept_bytes)
    assert (dry.dry_run, real.dry_run) == (True, False)


# Lifetimes


def test_expired_caches_go_and_pinned_ones_do_not(store):
    now = time.time()
    for name, facts in {
        "over": {"expires": now - 5},
        "pinned": {"expires": now - 5, "pinned": True},
        "later": {"expires": now + 500},
        "never": {"expires": None},
    }.items():
        save_cache(store, KV_ONLY, name, prompt(0, 300, len(name)), **facts)
    age(store.path, DAY)
    report = sweep(store)
    assert store.names() == ["later", "never", "pinned"]
    assert [(one.name, one.kind) for one in report.caches] == [("over", Kind.EXPIRED)]
    assert report.caches[0].reason.startswith("expired 20")
    assert tokens(store, prompt(0, 300, 4)) == 0
    assert tokens(store, prompt(0, 300, 6)) == 300


def test_expired_caches_stay_when_asked(store):
    save_cache(store, KV_ONLY, "over", TEXT[:300], expires=1.0)
    sweep(store, replace(NOW, expired=False))
    assert store.names() == ["over"]


def test_a_cache_whose_lifetime_is_extended_meanwhile_stays(store, monkeypatch):
    """The sweep has read that it is over; before it removes it, somebody extends it."""
    save_cache(store, KV_ONLY, "it", TEXT[:300], expires=1.0)
    age(store.path, DAY)
    move_aside = aside.move_aside

    def extended_first(path: Path):
        lifecycle.set_expiry(store, ["it"], None)
        return move_aside(path)

    monkeypatch.setattr("kvq.store.gc.collector.move_aside", extended_first)
    report = sweep(store)
    assert report.caches == []
    assert store.manifest("it").expires is None
    assert tokens(store, TEXT[:300]) == 300


# What jobs leave


def test_old_checkpoints_and_temporary_files_go(store):
    save_cache(store, RECURRENT, "it", TEXT[:600])
    block, _ = blocks_of(TEXT[:600])[0]
    folder = store.space_folder(RECURRENT)
    stale = block_path(folder, block, "state", ckpt=True)
    stale.write_bytes(b"x" * 10)
    temps = [
        stale.with_name(".tmp-7-abc.safetensors"),
        folder / ".tmp-7-abd.json",
        store.path / ".tmp-7-abe.json",
        store.path / "caches" / ".tmp-7-abf.json",
    ]
    for path in temps:
        path.write_bytes(b"y" * 20)
    before = files_in(store.path)
    collect(store, NOW)
    assert files_in(store.path) == before
    age(store.path, DAY)
    report = sweep(store)
    assert before - files_in(store.path) == {stale, *temps}
    assert (report.files[Kind.CHECKPOINT].files, report.files[Kind.CHECKPOINT].nbytes) == (1, 10)
    assert (report.files[Kind.TEMPORARY].files, report.files[Kind.TEMPORARY].nbytes) == (4, 80)


def test_foreign_files_are_left_alone(store):
    save(store, KV_ONLY, TEXT[:300])
    node = next(store.path.rglob("*.safetensors")).parent
    notes = [node / "notes.txt", store.path / "README", store.path / "caches" / "a b.json"]
    for path in notes:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    age(store.path, DAY)
    sweep(store)
    assert all(path.read_text() == "mine" for path in notes)


def test_quarantine_is_left_alone(store):
    saved = save(store, KV_ONLY, TEXT[:300])
    store.quarantine(DamagedFile(str(saved[0].path), "a test"))
    age(store.path, DAY)
    sweep(store)
    assert len(os.listdir(store.path / "quarantine")) == 2


# The agreement with writers


def test_a_block_touched_while_it_is_moved_aside_is_put_back(store, monkeypatch):
    save(store, WINDOWED, TEXT[:600])
    age(store.path, DAY)
    before = files_in(store.path)
    chain = [block for block, _ in blocks_of(TEXT[:600])]
    move_aside = aside.move_aside

    def held_first(path: Path):
        hold(store.space_folder(WINDOWED), chain)
        return move_aside(path)

    monkeypatch.setattr(sweep_module, "move_aside", held_first)
    report = sweep(store)
    assert files_in(store.path) == before
    assert 1 <= report.put_back <= len(chain)
    assert tokens(store, TEXT[:600], WINDOWED) == 600


def test_a_block_moved_aside_cannot_be_held(store, monkeypatch):
    """What the writer is told then; so it writes the block anew, and the sweep leaves that."""
    save(store, KV_ONLY, TEXT[:200])
    age(store.path, DAY)
    ((block, _),) = blocks_of(TEXT[:200])
    move_aside = aside.move_aside
    told: list[bool] = []

    def held_too_late(path: Path):
        moved = move_aside(path)
        told.append(hold(store.space_folder(KV_ONLY), [block]))
        save(store, KV_ONLY, TEXT[:200])
        return moved

    monkeypatch.setattr(sweep_module, "move_aside", held_too_late)
    report = sweep(store)
    assert told[0] is False
    assert report.files[Kind.UNREACHABLE].files >= 1
    assert tokens(store, TEXT[:200]) == 200


def test_touching_by_an_old_name_is_seen_while_files_settle(store, monkeypatch):
    """A client of a share remembers the directory and touches a file that is aside by now."""
    save(store, KV_ONLY, TEXT[:600])
    age(store.path, DAY)
    before = files_in(store.path)
    slept: list[float] = []

    def touch_aside(seconds: float) -> None:
        slept.append(seconds)
        for path in store.path.rglob(".gc-*"):
            os.utime(path)

    monkeypatch.setattr(sweep_module.time, "sleep", touch_aside)
    report = sweep(store, replace(NOW, settle=30))
    assert slept == [30]
    assert files_in(store.path) == before
    assert report.put_back == len(before) - 2


def test_what_a_manifest_names_once_files_have_settled_is_put_back(store, monkeypatch):
    save(store, KV_ONLY, TEXT[:600])
    age(store.path, DAY)
    named = manifest_of(store, KV_ONLY, "late", TEXT[:600])
    monkeypatch.setattr(sweep_module.time, "sleep", lambda seconds: store.write_manifest(named))
    sweep(store, replace(NOW, settle=30))
    assert tokens(store, TEXT[:600]) == 600


def test_an_interrupted_sweep_puts_everything_back(store, monkeypatch):
    save(store, KV_ONLY, TEXT[:600])
    age(store.path, DAY)
    before = files_in(store.path)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(store, replace(NOW, settle=30))
    assert files_in(store.path) == before


def test_what_a_killed_sweep_left_aside_is_put_back(store, monkeypatch):
    manifest = save_cache(store, KV_ONLY, "it", TEXT[:600])
    block = block_path(store.space_folder(KV_ONLY), manifest.blocks()[1])
    left = [aside.move_aside(block), aside.move_aside(store.path / "caches" / "it.json")]
    assert collect(store, NOW).put_back == 0
    assert all(one.place.exists() for one in left), "that sweep may still run"
    monkeypatch.setattr("kvq.store.gc.collector.ABANDONED", -1)
    monkeypatch.setattr("kvq.store.gc.sweep.ABANDONED", -1)
    sweep(store)
    assert store.manifest("it") == manifest
    assert tokens(store, TEXT[:600]) == 600


def test_putting_back_yields_to_a_file_written_meanwhile(store):
    saved = save(store, KV_ONLY, TEXT[:200])
    path = saved[0].path
    moved = aside.move_aside(path)
    path.write_bytes(b"newer")
    moved.put_back()
    assert path.read_bytes() == b"newer"
    assert not moved.place.exists()
    moved.put_back()


def test_a_rename_beside_a_sweep_keeps_the_blocks(store, monkeypatch):
    """The manifests are listed before the rename, and read after it."""
    save_cache(store, KV_ONLY, "a", TEXT[:600])
    age(store.path, DAY)
    manifest = Store.manifest
    renamed: list[str] = []

    def renamed_first(self: Store, name: str):
        if not renamed:
            renamed.append(name)
            lifecycle.rename(store, "a", "b")
        return manifest(self, name)

    monkeypatch.setattr(Store, "manifest", renamed_first)
    report = sweep(store)
    assert report.freed_bytes == 0
    assert report.kept_caches == 1
    assert tokens(store, TEXT[:600]) == 600


def test_a_rename_that_hides_from_every_listing_keeps_the_blocks(store, monkeypatch):
    save_cache(store, KV_ONLY, "a", TEXT[:600])
    age(store.path, DAY)
    names = Store.names

    def hidden(self: Store) -> list[str]:
        monkeypatch.setattr(Store, "names", names)
        lifecycle.rename(store, "a", "b")
        monkeypatch.setattr(Store, "names", hidden)
        return []

    monkeypatch.setattr(mark_module, "_LISTINGS", 1)
    monkeypatch.setattr(Store, "names", hidden)
    report = sweep(store)
    assert report.kept_caches == 0
    assert report.freed_bytes == 0
    assert tokens(store, TEXT[:600]) == 600


def test_two_sweeps_at_once(store, monkeypatch):
    for seed in range(3):
        save(store, KV_ONLY, prompt(0, 600, seed))
    save_cache(store, KV_ONLY, "it", TEXT[:600])
    age(store.path, DAY)
    move_aside = aside.move_aside
    others: list[Report] = []

    def another_first(path: Path):
        if not others:
            others.append(Report(dry_run=False))
            others[0] = collect(store, NOW)
        return move_aside(path)

    monkeypatch.setattr(sweep_module, "move_aside", another_first)
    report = sweep(store)
    assert others[0].files[Kind.UNREACHABLE].files == 12
    assert report.freed_bytes == 0
    assert tokens(store, TEXT[:600]) == 600


def test_a_writer_between_finding_and_writing(store):
    """It found the first blocks of its prompt in place, then waits while a sweep comes."""
    save(store, KV_ONLY, TEXT[:512])
    age(store.path, DAY)
    steps = save_steps(store, KV_ONLY, TEXT[:900])
    assert next(steps) is None
    assert next(steps) is None
    chain = [block for block, _ in blocks_of(TEXT[:900])]
    hold(store.space_folder(KV_ONLY), chain[:2])
    sweep(store)
    list(steps)
    assert hold(store.space_folder(KV_ONLY), chain)
    assert tokens(store, TEXT[:900]) == 900


# What it does not know


@pytest.mark.parametrize("content", ["{}", "newer"])
def test_blocks_stay_while_a_manifest_cannot_be_read(store, content):
    manifest = save_cache(store, KV_ONLY, "odd", TEXT[:600])
    path = store.path / "caches" / "odd.json"
    if content == "newer":
        data = manifest.encode().replace(b'"format": 1', b'"format": 9')
    else:
        data = content.encode()
    path.write_bytes(data)
    save_cache(store, KV_ONLY, "over", prompt(0, 300, 1), expires=1.0)
    age(store.path, DAY)
    report = sweep(store, replace(NOW, max_bytes=0))
    assert list(report.unreadable) == ["odd"]
    assert not report.complete
    assert store.names() == ["odd"]
    assert Kind.UNREACHABLE not in report.files
    assert path.read_bytes() == data


def test_a_store_that_is_not_there(store):
    (store.path / "kvq-store.json").unlink()
    with pytest.raises(StoreUnavailable):
        collect(store, NOW)


def test_a_store_that_cannot_be_written_can_be_looked_at(store, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    save(store, KV_ONLY, TEXT[:300])
    age(store.path, DAY)
    monkeypatch.setattr("kvq.store.gc.collector.publish", refuse)
    assert collect(store, NOW, dry_run=True).files[Kind.UNREACHABLE].files == 3
    with pytest.raises(StoreUnavailable, match="read-only"):
        collect(store, NOW)


def test_a_clock_that_is_wrong_does_no_harm(store, monkeypatch):
    """Ages are told by the file system's time."""
    save(store, KV_ONLY, TEXT[:300])
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert sweep(store).freed_bytes == 0


# Quotas


def quota(store: Store, limit: int, **how: bool) -> Report:
    return sweep(store, replace(NOW, max_bytes=limit), **how)


def test_within_the_quota_nothing_is_evicted(store):
    save_cache(store, KV_ONLY, "it", TEXT[:600])
    age(store.path, DAY)
    report = quota(store, sizes(store))
    assert report.caches == []
    assert report.over_quota == 0


def test_the_least_worth_goes_first(store):
    """Alike but for what they cost to compute: the cheapest goes."""
    for number, seconds in enumerate((9.0, 1.0, 5.0)):
        save_cache(store, KV_ONLY, f"c{number}", prompt(0, 600, number), prefill_seconds=seconds)
    age(store.path, DAY)
    limit = sizes(store) - 1000
    report = quota(store, limit)
    assert [(one.name, one.kind) for one in report.caches] == [("c1", Kind.QUOTA)]
    assert "1.0 s of prefill" in report.caches[0].reason
    assert store.names() == ["c0", "c2"]
    assert report.kept_bytes <= limit
    assert report.complete
    report = quota(store, 0)
    assert [one.name for one in report.caches] == ["c2", "c0"]
    assert report.kept_bytes == 0


def test_what_was_used_last_goes_last(store):
    for number in range(3):
        save_cache(store, KV_ONLY, f"c{number}", prompt(0, 300, number))
    age(store.path, 30 * DAY)
    used = store.match(KV_ONLY.fingerprint, prompt(0, 300, 0)).plan.kv[-1].header.path
    stamp = time.time() - 2 * DAY
    os.utime(used, (stamp, stamp))
    assert [one.name for one in quota(store, 0, dry_run=True).caches][-1] == "c0"


def test_pinned_and_young_caches_are_exempt(store):
    save_cache(store, KV_ONLY, "pinned", prompt(0, 600, 1), pinned=True)
    save_cache(store, KV_ONLY, "old", prompt(0, 600, 2))
    age(store.path, DAY)
    save_cache(store, KV_ONLY, "young", prompt(0, 600, 3))
    report = quota(store, 100)
    assert [one.name for one in report.caches] == ["old"]
    assert store.names() == ["pinned", "young"]
    assert report.over_quota == report.kept_bytes - 100 > 0
    assert not report.complete


def test_shared_blocks_count_for_the_last_that_holds_them(store):
    """Each of two caches alone holds little; together they hold the long prefix."""
    one, two = prompt(2560, 10, 1), prompt(2560, 10, 2)
    save_cache(store, KV_ONLY, "one", one, prefill_seconds=1.0)
    save_cache(store, KV_ONLY, "two", two, prefill_seconds=2.0)
    save_cache(store, KV_ONLY, "cheap", prompt(0, 1000, 3), prefill_seconds=0.001)
    age(store.path, DAY)
    everything = sizes(store)
    report = quota(store, everything - 2000, dry_run=True)
    assert [one.name for one in report.caches] == ["cheap"]
    report = quota(store, 2000, dry_run=True)
    assert [one.name for one in report.caches] == ["cheap", "one", "two"]
    assert report.kept_bytes == 0


def test_a_cache_that_changed_since_it_was_judged_is_not_evicted(store, monkeypatch):
    save_cache(store, KV_ONLY, "it", TEXT[:600])
    age(store.path, DAY)
    move_aside = aside.move_aside

    def pinned_first(path: Path):
        lifecycle.set_pinned(store, ["it"], True)
        return move_aside(path)

    monkeypatch.setattr("kvq.store.gc.collector.move_aside", pinned_first)
    report = quota(store, 0)
    assert report.caches == []
    assert tokens(store, TEXT[:600]) == 600


def test_models_that_never_told_their_pace_are_judged_by_others(store):
    known = make_space(*KV_ONLY.leaves, fingerprint="1" * 40)
    save_cache(store, known, "slow", prompt(0, 600, 1), prefill_seconds=60.0)
    save_cache(store, known, "reused", prompt(0, 600, 2), reused_tokens=600)
    save_cache(store, KV_ONLY, "unknown", prompt(0, 600, 3), prefill_seconds=0.0)
    age(store.path, DAY)
    assert quota(store, 0, dry_run=True).caches[0].name == "unknown"


def test_reading_a_cache_that_is_gone(store):
    save_cache(store, KV_ONLY, "it", TEXT[:300])
    age(store.path, DAY)
    quota(store, 0)
    with pytest.raises(CacheNotFound):
        store.manifest("it")
    assert tokens(store, TEXT[:300]) == 0
