"""Caches after they were written: names, pins, lifetimes, and what they take on the disk."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from dummystore import KV_ONLY, RECURRENT, WINDOWED, age, files_in, save, save_cache

from kvq.errors import CacheNotFound, DamagedFile, InvalidName, UsageError
from kvq.store import Store, layout
from kvq.store.footprint import files_of, footprints
from kvq.store.lifecycle import (
    choose,
    find,
    forget,
    parse_expiry,
    read_manifests,
    rename,
    set_expiry,
    set_pinned,
)
from kvq.store.listing import Filter, Order, Row, arrange

PROMPT = tuple(range(1000, 1600))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def blocks_on_disk(store: Store) -> int:
    paths = files_in(layout.spaces_dir(store.path))
    return sum(path.stat().st_size for path in paths if path.suffix == layout.SUFFIX)


def sizes(store: Store) -> dict[str, tuple[int, int]]:
    found = footprints(store.path, read_manifests(store).readable.values())
    assert found.nbytes <= blocks_on_disk(store)
    return {name: (one.nbytes, one.own_bytes) for name, one in found.of.items()}


# Sizes


@pytest.mark.parametrize("space", [KV_ONLY, WINDOWED, RECURRENT])
def test_the_size_is_that_of_the_files_on_the_disk(store: Store, space: object) -> None:
    save_cache(store, space, "one", PROMPT, kept=[100, 300])
    total = blocks_on_disk(store)
    assert sizes(store) == {"one": (total, total)}
    files = files_of(store.path, store.manifest("one"))
    assert sum(one.nbytes for one in files) == total
    on_disk = files_in(layout.spaces_dir(store.path))
    assert {one.path for one in files} == {one for one in on_disk if one.suffix == layout.SUFFIX}


def test_what_is_shared_is_nobodys_own(store: Store) -> None:
    save_cache(store, KV_ONLY, "a", (*PROMPT[:512], 1, 2, 3))
    first = blocks_on_disk(store)
    save_cache(store, KV_ONLY, "b", (*PROMPT[:512], 4, 5))
    both = blocks_on_disk(store)
    found = footprints(store.path, read_manifests(store).readable.values())
    assert found.nbytes == both
    a, b = found.of["a"], found.of["b"]
    assert a.nbytes == first
    assert b.own_bytes == both - first
    assert a.shared_bytes == b.shared_bytes == both - a.own_bytes - b.own_bytes > 0

    # A copy under another name leaves nothing to own; when it goes, all is own again.
    save_cache(store, KV_ONLY, "c", (*PROMPT[:512], 4, 5))
    assert sizes(store)["b"] == (b.nbytes, 0)
    forget(store, ["c", "a"])
    assert sizes(store) == {"b": (b.nbytes, b.nbytes)}


def test_blocks_of_no_cache_are_not_counted(store: Store) -> None:
    save_cache(store, KV_ONLY, "one", PROMPT)
    total = blocks_on_disk(store)
    save(store, KV_ONLY, (*PROMPT[:256], 9, 9))
    assert sizes(store) == {"one": (total, total)}


def test_missing_blocks_are_counted(store: Store) -> None:
    save_cache(store, KV_ONLY, "one", PROMPT)
    files = files_of(store.path, store.manifest("one"))
    next(one for one in files if one.record == "kv" and one.start == 256).path.unlink()
    found = footprints(store.path, [store.manifest("one")])
    assert found.of["one"].missing == 1
    assert found.nbytes == blocks_on_disk(store)


def test_files_say_where_they_are_in_the_prompt(store: Store) -> None:
    save_cache(store, RECURRENT, "one", PROMPT, kept=[100, 300])
    files = files_of(store.path, store.manifest("one"))
    kv = [(one.start, one.end) for one in files if one.record == "kv"]
    assert kv == [(0, 256), (256, 512), (512, 600), (0, 100), (256, 300)]
    assert {(one.record, one.end) for one in files if one.record != "kv"} == {
        ("state", 100), ("state", 300), ("state", 600), ("logits", 600),
    }  # fmt: skip


def test_last_use_is_that_of_own_blocks(store: Store) -> None:
    save_cache(store, KV_ONLY, "a", (*PROMPT[:256], 1), created=1000.0)
    save_cache(store, KV_ONLY, "b", (*PROMPT[:256], 2), created=2000.0)
    age(layout.spaces_dir(store.path), 10**10)  # long before either manifest
    files = {name: files_of(store.path, store.manifest(name)) for name in "ab"}
    shared, own = (one.path for one in files["a"] if one.record == "kv")
    os.utime(shared, (9000.0, 9000.0))
    os.utime(own, (5000.0, 5000.0))
    found = footprints(store.path, read_manifests(store).readable.values())
    assert found.of["a"].used == 5000.0
    assert found.of["b"].used == 2000.0


# Names


def test_names_and_patterns_are_chosen_once_each(store: Store) -> None:
    for name in ("b-1", "b-2", "c"):
        save_cache(store, KV_ONLY, name, PROMPT)
    assert choose(store, ["c", "b-*", "b-1"]) == ["c", "b-1", "b-2"]
    assert choose(store, ["?"]) == ["c"]
    with pytest.raises(CacheNotFound, match="like 'x\\*'"):
        choose(store, ["c", "x*"])


def test_a_wrong_name_gets_those_that_are_alike(store: Store) -> None:
    for name in ("report-2031", "other"):
        save_cache(store, KV_ONLY, name, PROMPT)
    for act in (lambda n: choose(store, [n]), lambda n: find(store, n)):
        with pytest.raises(CacheNotFound, match="did you mean report-2031"):
            act("reprot-2031")
        with pytest.raises(CacheNotFound, match="kvq ls"):
            act("zzzzzz")


def test_forgetting_leaves_the_blocks(store: Store) -> None:
    save_cache(store, KV_ONLY, "one", PROMPT)
    total = blocks_on_disk(store)
    assert forget(store, ["one", "gone"]) == ["one"]
    assert store.names() == []
    assert blocks_on_disk(store) == total
    assert store.match(KV_ONLY.fingerprint, PROMPT).tokens == len(PROMPT)


def test_an_unreadable_manifest_is_named_and_can_be_forgotten(store: Store) -> None:
    save_cache(store, KV_ONLY, "bad", PROMPT)
    save_cache(store, KV_ONLY, "good", PROMPT)
    layout.manifest_path(store.path, "bad").write_text("{}")
    found = read_manifests(store)
    assert list(found.readable) == ["good"]
    assert list(found.unreadable) == ["bad"]
    assert "cannot be read" in found.unreadable["bad"]
    with pytest.raises(DamagedFile):
        find(store, "bad")
    assert forget(store, choose(store, ["bad"])) == ["bad"]


# Renaming


def test_a_renamed_cache_is_the_same_but_for_its_name(store: Store) -> None:
    before = save_cache(store, KV_ONLY, "old", PROMPT, metadata={"k": 1}, pinned=True)
    moved = rename(store, "old", "new")
    assert store.names() == ["new"]
    after = store.manifest("new")
    assert after == moved
    assert after.name == "new"
    assert (after.chain, after.metadata, after.pinned) == (before.chain, {"k": 1}, True)


def test_a_taken_name_is_kept_unless_forced(store: Store) -> None:
    save_cache(store, KV_ONLY, "old", PROMPT)
    save_cache(store, KV_ONLY, "new", PROMPT[:50])
    with pytest.raises(UsageError, match="--force"):
        rename(store, "old", "new")
    assert store.names() == ["new", "old"]
    assert store.manifest("new").tokens == 50
    rename(store, "old", "new", force=True)
    assert store.names() == ["new"]
    assert store.manifest("new").tokens == 600


def test_renaming_to_itself_changes_nothing(store: Store) -> None:
    save_cache(store, KV_ONLY, "old", PROMPT)
    assert rename(store, "old", "old") == store.manifest("old")


@pytest.mark.parametrize("new", ["", "a/b", "../x", ".hidden", "x" * 129, "é"])
def test_a_bad_new_name_is_refused(store: Store, new: str) -> None:
    save_cache(store, KV_ONLY, "old", PROMPT)
    with pytest.raises(InvalidName):
        rename(store, "old", new)
    assert store.names() == ["old"]


def test_names_that_the_file_system_takes_for_one_are_refused(store: Store) -> None:
    save_cache(store, KV_ONLY, "old", PROMPT)
    # As a file system that ignores case would have it.
    os.link(layout.manifest_path(store.path, "old"), layout.manifest_path(store.path, "OLD"))
    for force in (False, True):
        with pytest.raises(UsageError, match="one name"):
            rename(store, "old", "OLD", force=force)
    assert store.manifest("old").tokens == 600


def test_a_reader_finds_one_of_the_names_at_every_moment(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_cache(store, KV_ONLY, "old", PROMPT)
    seen = []
    unlink = Path.unlink

    def watched(path: Path, *given: object, **named: object) -> None:
        seen.append(store.names())
        unlink(path, *given, **named)

    monkeypatch.setattr(Path, "unlink", watched)
    rename(store, "old", "new")
    assert seen == [["new", "old"]]


# Pins and lifetimes


def test_pins_come_and_go_and_a_wrong_name_changes_none(store: Store) -> None:
    for name in "ab":
        save_cache(store, KV_ONLY, name, PROMPT)
    assert [one.pinned for one in set_pinned(store, ["a", "b"], True)] == [True, True]
    assert store.manifest("a").pinned
    set_pinned(store, ["a"], False)
    assert not store.manifest("a").pinned
    with pytest.raises(CacheNotFound):
        set_pinned(store, ["a", "none"], True)
    assert not store.manifest("a").pinned


def test_an_unchanged_manifest_is_not_written_again(store: Store) -> None:
    save_cache(store, KV_ONLY, "a", PROMPT, pinned=True)
    path = layout.manifest_path(store.path, "a")
    before = path.stat().st_ino
    set_pinned(store, ["a"], True)
    assert path.stat().st_ino == before


def test_lifetimes_are_set_and_taken_away(store: Store) -> None:
    save_cache(store, KV_ONLY, "a", PROMPT)
    assert set_expiry(store, ["a"], 5000.0)[0].expires == 5000.0
    assert store.manifest("a").expires == 5000.0
    set_expiry(store, ["a"], None)
    assert store.manifest("a").expires is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7d", 1000.0 + 7 * 86400),
        ("1h30m", 1000.0 + 5400),
        ("90", 1090.0),
        ("0", 1000.0),
        ("never", None),
        (" Never ", None),
        ("2031-05-01T12:00:00Z", datetime(2031, 5, 1, 12, tzinfo=UTC).timestamp()),
        ("2031-05-01T14:00+02:00", datetime(2031, 5, 1, 12, tzinfo=UTC).timestamp()),
        ("2031-05-01", datetime(2031, 5, 1).astimezone().timestamp()),
    ],
)
def test_lifetimes_as_people_write_them(text: str, expected: float | None) -> None:
    assert parse_expiry(text, now=1000.0) == expected


@pytest.mark.parametrize("text", ["", "soon", "7 days", "-1", "2031-13-01", "inf", "nan", "1e15"])
def test_other_lifetimes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither a duration|not between the years"):
        parse_expiry(text, now=1000.0)


# Lists


def rows(store: Store) -> list[Row]:
    every = list(read_manifests(store).readable.values())
    found = footprints(store.path, every)
    return [Row(manifest=one, footprint=found.of[one.name]) for one in every]


def names(found: list[Row]) -> list[str]:
    return [row.manifest.name for row in found]


def test_the_order_is_the_one_asked_for(store: Store) -> None:
    save_cache(store, KV_ONLY, "b", PROMPT, created=3e9)
    save_cache(store, KV_ONLY, "a", PROMPT[:20], created=4e9)
    save_cache(store, KV_ONLY, "c", range(2000), created=2e9)
    path = files_of(store.path, store.manifest("c"))[0].path
    os.utime(path, (5e9, 5e9))
    found = rows(store)
    assert names(arrange(found, Order.NAME)) == ["a", "b", "c"]
    assert names(arrange(found, Order.NAME, reverse=True)) == ["c", "b", "a"]
    assert names(arrange(found, Order.CREATED)) == ["a", "b", "c"]
    assert names(arrange(found, Order.USED)) == ["c", "a", "b"]
    assert names(arrange(found, Order.SIZE)) == ["c", "b", "a"]
    assert names(arrange(found, Order.SIZE, reverse=True)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["a-1", "a-2", "b"]),
        ({"name": "a-*"}, ["a-1", "a-2"]),
        ({"codec": "raw"}, ["a-1", "a-2", "b"]),
        ({"codec": "q8"}, []),
        ({"model": "org/Big-4bit"}, ["a-1"]),
        ({"model": "Big-4bit"}, ["a-1"]),
        ({"model": "Big*"}, ["a-1"]),
        ({"model": "/models/Small/"}, ["a-2"]),
        ({"model": "Small"}, ["a-2"]),
        ({"model": "big-4bit"}, []),
        ({"model": "ffffff"}, ["a-1", "a-2", "b"]),
        ({"model": "fffff"}, []),
        ({"expired": True}, ["a-1", "b"]),
        ({"pinned": True}, ["b"]),
        ({"pinned": True, "name": "a*"}, []),
    ],
)
def test_filters_take_what_fulfils_them_all(
    store: Store, given: dict[str, object], expected: list[str]
) -> None:
    save_cache(store, KV_ONLY, "a-1", PROMPT, model="org/Big-4bit", expires=50.0)
    save_cache(store, KV_ONLY, "a-2", PROMPT, model="/models/Small/", expires=150.0)
    save_cache(store, KV_ONLY, "b", PROMPT, pinned=True, expires=100.0)
    wanted = Filter(**given)
    manifests = read_manifests(store).readable.values()
    assert [one.name for one in manifests if wanted.takes(one, 100.0)] == expected
