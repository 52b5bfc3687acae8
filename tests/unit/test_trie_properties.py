"""Whatever was saved, in whatever order: a match is the longest prefix that can be restored.

The oracle knows which files were written and tries every position; it knows nothing of the trie.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from dummystore import KV, STATE, Saved, check_plan, make_space, save_steps, window_leaf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvq.errors import DamagedFile
from kvq.store import End, Match, Space, Store
from kvq.store.keys import BLOCK

SPACES = {
    "kv": make_space(KV),
    "window": make_space(KV, window_leaf(8)),
    "wide-window": make_space(KV, window_leaf(300)),
    "sinks": make_space(KV, window_leaf(40, keep=4)),
    "windows-only": make_space(window_leaf(64)),
    "state": make_space(KV, STATE),
    "state-only": make_space(STATE),
    "window-and-state": make_space(KV, window_leaf(100), STATE),
}
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())

_TEXTS = np.random.default_rng(11).integers(0, 50_000, (3, 2 * BLOCK))
_LENGTHS = (1, 15, 16, 17, 100, 255, 256, 257, 400, 512)

#: A prompt is a few pieces, so two prompts often share some and part inside or between blocks.
pieces = st.tuples(st.integers(0, 2), st.sampled_from(_LENGTHS))
prompts = st.lists(pieces, min_size=1, max_size=5).map(
    lambda parts: np.concatenate([_TEXTS[text, :length] for text, length in parts])
)


#: A prompt, its kept positions, and how many rows its window files lack at their start.
Work = tuple[np.ndarray, tuple[int, ...], int]


@st.composite
def saves(draw: st.DrawFn) -> Work:
    ids = draw(prompts)
    kept = draw(st.lists(st.integers(1, len(ids)), max_size=2))
    return ids, tuple(kept), draw(st.sampled_from((0, 0, 60)))


@st.composite
def queries(draw: st.DrawFn, saved: Sequence[Work]) -> np.ndarray:
    """Some prompt that was saved, or the beginning of one, and something else after it."""
    ids, kept, _ = draw(st.sampled_from(saved))
    cut = draw(st.one_of(st.just(len(ids)), st.sampled_from((*kept, 1)), st.integers(0, len(ids))))
    more = draw(st.one_of(st.just(np.empty(0, np.int64)), prompts))
    return np.concatenate([ids[:cut], more])


workloads = st.lists(saves(), min_size=1, max_size=4)
few = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def restorable(files: Sequence[Saved], ids: Sequence[int], position: int, space: Space) -> bool:
    """Whether the files hold all that a restore of exactly ids[:position] needs."""
    if position == 0:
        return True
    wanted = tuple(int(token) for token in ids[:position])
    last = (position - 1) // BLOCK * BLOCK

    def having(record: str, start: int) -> Iterator[Saved]:
        """Files of that record of the blocks at `start` that begin like the prompt."""
        stop = min(start + BLOCK, position)
        for one in files:
            if one.record == record and one.start == start and one.prefix[:stop] == wanted[:stop]:
                yield one

    def has_rows(path: Sequence[Saved], low: int, high: int) -> bool:
        for block in path:
            first, stop = max(low, block.start), min(high, block.end)
            if first < stop and not any(
                one.prefix == block.prefix and one.low <= first - block.start
                for one in having("window", block.start)
            ):
                return False
        return True

    full = [
        next((one for one in having("kv", start) if one.end == start + BLOCK), None)
        for start in range(0, last, BLOCK)
    ]
    if None in full:
        return False
    for end in having("kv", last):
        path = [*full, end]
        needs = space.needs
        if needs.state and not (
            end.end == position and any(one.prefix == end.prefix for one in having("state", last))
        ):
            continue
        if needs.window:
            low = max(0, position - needs.window)
            if not (has_rows(path, low, position) and has_rows(path, 0, min(needs.keep, low))):
                continue
        return True
    return False


def longest(files: Sequence[Saved], ids: Sequence[int], space: Space) -> int:
    return next(p for p in range(len(ids), -1, -1) if restorable(files, ids, p, space))


def run_together(
    store: Store,
    space: Space,
    work: Sequence[Work],
    order: Iterator[bool],
) -> list[Saved]:
    """Two writers share the prompts; `order` says whose turn it is. The files as they are then."""
    files: dict[object, Saved] = {}

    def one_writer(share: Sequence[Work]) -> Iterator[object]:
        for ids, kept, lows in share:
            yield from save_steps(store, space, ids, kept=kept, lows=lows)

    writers = [one_writer(work[0::2]), one_writer(work[1::2])]
    while writers:
        writer = writers[next(order) % len(writers)]
        try:
            done = next(writer)
        except StopIteration:
            writers.remove(writer)
            continue
        if isinstance(done, Saved):
            files[done.path] = done
    return list(files.values())


def turns(draw: st.DrawFn) -> Iterator[bool]:
    """Whose turn: a few drawn runs, repeated."""
    runs = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    while True:
        for number, run in enumerate(runs):
            yield from [bool(number % 2)] * run


def match_of(store: Store, space: Space, ids: np.ndarray) -> Match:
    return store.match(space.fingerprint, ids)


@every_space
@few
@given(data=st.data())
def test_a_match_is_the_longest_restorable_prefix(space: Space, data: st.DataObject) -> None:
    work = data.draw(workloads)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(folder)
        files = run_together(store, space, work, turns(data.draw))
        for _ in range(3):
            ids = data.draw(queries(work))
            match = match_of(store, space, ids)
            assert match.tokens == longest(files, ids, space)
            check_plan(match.plan, ids, space)
            assert (match.reason.end is End.COMPLETE) == (match.tokens == len(ids))
            limit = data.draw(st.integers(0, len(ids)))
            cut = match.plan_upto(limit)
            assert cut.tokens == longest(files, ids[:limit], space)
            check_plan(cut, ids, space)


@every_space
@few
@given(data=st.data())
def test_a_saved_prompt_is_an_exact_match(space: Space, data: st.DataObject) -> None:
    work = [(ids, kept, 0) for ids, kept, _ in data.draw(workloads)]
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(folder)
        run_together(store, space, work, turns(data.draw))
        for ids, kept, _ in work:
            match = match_of(store, space, ids)
            assert match.exact
            for position in kept:
                assert match.plan_at(position).tokens == position


@every_space
@few
@given(data=st.data())
def test_without_some_files_a_match_is_shorter_and_right(space: Space, data: st.DataObject) -> None:
    work = data.draw(workloads)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(folder)
        files = run_together(store, space, work, turns(data.draw))
        gone = data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3))
        for one in gone:
            one.path.unlink(missing_ok=True)
        left = [one for one in files if one not in gone]
        for ids in [data.draw(queries(work)), *(ids for ids, _, _ in work)]:
            match = match_of(store, space, ids)
            assert match.tokens == longest(left, ids, space) <= longest(files, ids, space)
            check_plan(match.plan, ids, space)


@every_space
@few
@given(data=st.data())
def test_damage_gives_a_shorter_match_and_never_a_wrong_row(
    space: Space, data: st.DataObject
) -> None:
    work = data.draw(workloads)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(folder)
        files = run_together(store, space, work, turns(data.draw))
        bad = data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3))
        for one in {one.path: one for one in bad}.values():
            damage(one, data)
        sound = [one for one in files if one not in bad]
        for ids in [data.draw(queries(work)), *(ids for ids, _, _ in work)]:
            tokens = read_as_an_app_does(store, space, ids)
            assert longest(sound, ids, space) <= tokens <= longest(files, ids, space)
        # Each of those prompts has now been read: what is bad has been put aside or is not needed.
        for ids, _, _ in work:
            check_plan(match_of(store, space, ids).plan, ids, space)


def damage(one: Saved, data: st.DataObject) -> None:
    raw = bytearray(one.path.read_bytes())
    how = data.draw(st.sampled_from(("flip", "cut", "swap")))
    if how == "flip":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[:] = bytes(len(raw))
    one.path.write_bytes(raw)


def read_as_an_app_does(store: Store, space: Space, ids: np.ndarray) -> int:
    """Match and read; where a file proves bad, once more without it. The tokens restored."""
    while True:
        match = match_of(store, space, ids)
        try:
            check_plan(match.plan, ids, space)
        except DamagedFile as error:
            moved = store.quarantine(error)
        else:
            return match.tokens
        assert moved
