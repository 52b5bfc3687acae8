"""However a sweep and writers interleave: what a manifest names is there, its rows are right."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
from dummystore import (
    KV,
    STATE,
    age,
    blocks_of,
    check_plan,
    make_space,
    manifest_of,
    publish,
    rows_of,
    save,
    window_leaf,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvq.errors import CacheNotFound
from kvq.store import Space, Store, lifecycle
from kvq.store.gc import Policy, aside, collect, collector, sweep
from kvq.store.hold import touch
from kvq.store.layout import RECORDS, block_path

DAY = 86400.0
SPACES = {
    "kv": make_space(KV),
    "window": make_space(KV, window_leaf(64)),
    "state": make_space(KV, STATE),
}
_TEXT = np.random.default_rng(2).integers(0, 1000, 700)


def prompt(number: int) -> np.ndarray:
    """Of any two some share their first block, some two of them, some nothing."""
    own = np.random.default_rng(number).integers(1000, 2000, 20 + number)
    return np.concatenate([_TEXT[: (0, 256, 300, 512)[number % 4]], own]).astype(np.uint32)


def kept(number: int) -> tuple[int, ...]:
    return (10 + number,) if number % 2 else ()


def store_steps(store: Store, space: Space, number: int, promised: set[str]) -> Iterator[None]:
    """Store a prompt as a prefill does, a step at a time; adds its name to `promised`."""
    name = f"c{number}"
    for _ in range(20):
        yield from write_missing(store, space, number)
        ids = prompt(number)
        if not store.match(space.fingerprint, ids).exact:
            continue
        manifest = manifest_of(store, space, name, ids, kept=kept(number))
        whole = True
        for block in manifest.blocks():
            for record in RECORDS:
                present = touch(block_path(store.space_folder(space), block, record))
                whole &= present or record != "kv"
                yield
        if whole:
            yield
            store.write_manifest(manifest)
            promised.add(name)
            return
    raise AssertionError("could not be stored")


def write_missing(store: Store, space: Space, number: int) -> Iterator[None]:
    ids = prompt(number)
    folder = store.add_space(space)
    ends = {*kept(number), len(ids)}
    branches = [blocks_of(ids[:at])[-1] for at in kept(number) if space.needs.state]
    for block, start in (*blocks_of(ids), *branches):
        for record in RECORDS:
            needed = {
                "kv": True,
                "window": space.needs.window > 0,
                "state": space.needs.state and start + block.n in ends,
                "logits": start + block.n == len(ids),
            }[record]
            path = block_path(folder, block, record)
            if not needed or touch(path):
                continue
            yield
            rows = rows_of(ids)[start : start + block.n]
            publish(path, space, block, ids, start, record, rows)
            yield


def change_steps(
    store: Store, changes: list[tuple[str, int]], promised: set[str]
) -> Iterator[None]:
    """Rename, extend and forget caches; `promised` are the names that must exist then."""
    for what, number in changes:
        name = f"c{number}"
        try:
            if what == "extend":
                lifecycle.set_expiry(store, [name], None)
                promised.add(name)
            elif what == "rename":
                if lifecycle.rename(store, name, f"r{number}", force=True).expires is None:
                    promised.add(f"r{number}")
                promised.discard(name)
            else:
                store.remove_manifest(name)
                promised.discard(name)
        except CacheNotFound:
            assert name not in promised
        yield


def interleaved(steps: Iterator[None], data: st.DataObject) -> ExitStack:
    """At each thing that a sweep does, some steps of the others are done first."""
    busy = False

    def others_first(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **how: Any) -> Any:
            nonlocal busy
            if not busy:
                busy = True
                for _ in range(data.draw(st.sampled_from((0, 0, 1, 1, 2, 7, 40)))):
                    next(steps, None)
                busy = False
            return function(*args, **how)

        return wrapped

    stack = ExitStack()
    for owner, name in (
        (sweep, "move_aside"),
        (collector, "move_aside"),
        (aside.Aside, "touched_since"),
        (aside.Aside, "remove"),
        (aside.Aside, "put_back"),
        (Store, "names"),
        (Store, "manifest"),
        (sweep.time, "sleep"),
    ):
        function = getattr(owner, name) if name != "sleep" else lambda seconds: None
        stack.enter_context(mock.patch.object(owner, name, others_first(function)))
    return stack


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_sweep_takes_what_a_manifest_names(space: Space, data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 7), unique=True, max_size=4)
    stored, forgotten, wanted = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    changes = data.draw(
        st.lists(
            st.tuples(st.sampled_from(("rename", "extend", "forget")), st.integers(0, 7)),
            max_size=4,
        )
    )
    expired = data.draw(st.sets(st.sampled_from([*stored, -1])))
    settle = data.draw(st.sampled_from((0, 0, 60)))
    promised: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(folder)
        for number in stored:
            for _ in store_steps(store, space, number, promised):
                pass
            if number in expired:
                lifecycle.set_expiry(store, [f"c{number}"], 1.0)
                promised.discard(f"c{number}")
        for number in forgotten:
            save(store, space, prompt(number), kept=kept(number))
        age(store.path, DAY)
        writers = [store_steps(store, space, number, promised) for number in wanted]
        order = data.draw(st.permutations([*writers, change_steps(store, changes, promised)]))
        steps = (None for one in order for _ in one)
        with interleaved(steps, data):
            collect(store, Policy(grace=3600, settle=settle))
        for _ in steps:
            pass
        assert not list(store.path.rglob(".gc-*"))
        for _ in range(2):
            assert promised <= set(store.names())
            for name in store.names():
                check_cache(store, space, name)
            collect(store, Policy(grace=0, settle=0))


def check_cache(store: Store, space: Space, name: str) -> None:
    number = int(name[1:])
    ids = prompt(number)
    match = store.match(space.fingerprint, ids)
    assert match.exact
    check_plan(match.plan, ids, space)
    for position in store.manifest(name).kept:
        assert match.plan_at(position).tokens == position
