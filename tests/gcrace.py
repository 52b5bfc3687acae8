"""Writers, readers and sweeps that share a store for a while, each in a process of its own.

A cache's name tells its prompt, so a reader knows what every row has to be. What went wrong is put
into a queue as text.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from dummystore import (
    KV,
    STATE,
    blocks_of,
    check_plan,
    make_space,
    manifest_of,
    publish,
    rows_of,
    window_leaf,
)

from kvq.errors import CacheNotFound
from kvq.store import Store, lifecycle
from kvq.store.gc import Policy, collect
from kvq.store.hold import touch
from kvq.store.layout import block_path

SPACE = make_space(KV, window_leaf(64), STATE)
#: Prompts share one of two beginnings, and part inside its blocks or after them.
BEGINNINGS = np.random.default_rng(1).integers(0, 1000, (2, 700))
PROMPTS = 24
GRACE = 0.3


@dataclass
class Log:
    """What one process did and what went wrong."""

    who: str
    counts: Counter[str] = field(default_factory=Counter)


def prompt(number: int) -> np.ndarray:
    own = np.random.default_rng(100 + number).integers(1000, 2000, 80 + 31 * (number % 7))
    shared = BEGINNINGS[number % 2][: 150 + 110 * (number % 6)]
    return np.concatenate([shared, own]).astype(np.uint32)


def kept(number: int) -> tuple[int, ...]:
    return (100 + 13 * (number % 5),)


def run(
    role: Callable[[Store, random.Random, Counter[str]], None],
    path: str,
    seed: int,
    seconds: float,
    queue: Queue[Any],
) -> None:
    """Play `role` over and over for so many seconds; report counts or the traceback."""
    store, dice, counts = Store(path), random.Random(seed), Counter[str]()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            role(store, dice, counts)
        queue.put((role.__name__, dict(counts), None))
    except BaseException:
        queue.put((role.__name__, dict(counts), traceback.format_exc()))


def writer(store: Store, dice: random.Random, counts: Counter[str]) -> None:
    """Store a prompt as a prefill does; sometimes change, rename or forget a cache instead."""
    number = dice.randrange(PROMPTS)
    name = f"c{number}"
    what = dice.random()
    try:
        if what < 0.5:
            store.remove_manifest(name)
            counts["forgotten"] += 1
            # Its blocks are about to be old enough when they are wanted again.
            time.sleep(dice.uniform(0.8, 1.3) * GRACE)
            store_prompt(store, number, name, dice, counts)
        elif what < 0.55:
            lifecycle.rename(store, name, f"r{number}", force=True)
            counts["renamed"] += 1
        elif what < 0.6:
            lifecycle.set_expiry(store, [name], time.time() + dice.choice((-1, 60)))
            counts["given a lifetime"] += 1
        else:
            store_prompt(store, number, name, dice, counts)
    except CacheNotFound:
        counts["not found"] += 1


def store_prompt(
    store: Store, number: int, name: str, dice: random.Random, counts: Counter[str]
) -> None:
    ids = prompt(number)
    for _ in range(20):
        save_touching(store, ids, kept(number), dice)
        if not store.match(SPACE.fingerprint, ids).exact:
            counts["lost before the manifest"] += 1
        elif publish_manifest(store, number, name):
            counts["stored"] += 1
            check_named(store, name, counts)
            return
        else:
            counts["lost while holding"] += 1
    raise AssertionError(f"{name} could not be stored")


def publish_manifest(store: Store, number: int, name: str) -> bool:
    ids = prompt(number)
    manifest = manifest_of(store, SPACE, name, ids, kept=kept(number), created=time.time())
    time.sleep(number % 3 / 100)
    return store.publish_held(manifest)


def check_named(store: Store, name: str, counts: Counter[str]) -> None:
    """All that a manifest promises is there for as long as it is."""
    deadline = time.monotonic() + 2
    first = None
    while time.monotonic() < deadline:
        try:
            manifest = store.manifest(name)
        except CacheNotFound:
            return
        if first not in (None, manifest):
            return
        first = manifest
        ids = prompt(int(name[1:]))
        if read(store, ids) == manifest.tokens and all(
            store.match(SPACE.fingerprint, ids).plan_upto(at).tokens == at for at in manifest.kept
        ):
            counts["caches read"] += 1
            return
        # A sweep may hold a block aside for a moment, and the cache may just be forgotten.
        counts["gaps"] += 1
    raise AssertionError(f"{name} has a manifest, and its blocks are gone")


def save_touching(
    store: Store, ids: np.ndarray, positions: tuple[int, ...], dice: random.Random
) -> None:
    """Write what is missing, touch what is there, with pauses as a model makes them."""
    folder = store.add_space(SPACE)
    digests = rows_of(ids)
    ends = {*positions, len(ids)}
    branches = [blocks_of(ids[:at])[-1] for at in positions]
    for block, start in (*blocks_of(ids), *branches):
        for record in ("kv", "window", "state", "logits"):
            if record == "state" and start + block.n not in ends:
                continue
            if record == "logits" and start + block.n != len(ids):
                continue
            path = block_path(folder, block, record)
            if not touch(path):
                time.sleep(dice.choice((0, 0, 0.002)))
                rows = digests[start : start + block.n]
                write(path, block, ids, start, record, rows)


def write(path: Any, block: Any, ids: Any, start: int, record: str, rows: Any) -> None:
    for _ in range(10):
        try:
            publish(path, SPACE, block, ids, start, record, rows)
        except FileNotFoundError:  # a sweep removed the empty directory
            continue
        return
    raise AssertionError("could not write")


def reader(store: Store, dice: random.Random, counts: Counter[str]) -> None:
    """Read some prompt, whatever of it is there; then a cache of which there is a manifest."""
    number = dice.randrange(PROMPTS)
    ids = prompt(number)
    cut = dice.randrange(len(ids) + 1)
    counts["tokens read"] += read(store, ids[:cut])
    names = store.names()
    if not names:
        return
    check_named(store, dice.choice(names), counts)


def read(store: Store, ids: np.ndarray) -> int:
    """Match and read, again where a file has gone meanwhile; the tokens restored."""
    while True:
        match = store.match(SPACE.fingerprint, ids)
        try:
            check_plan(match.plan, ids, SPACE)
        except FileNotFoundError:
            continue
        return match.tokens


def sweeper(store: Store, dice: random.Random, counts: Counter[str]) -> None:
    policy = Policy(grace=GRACE, settle=dice.choice((0, 0, 0.1)))
    report = collect(store, policy)
    counts["sweeps"] += 1
    counts["files removed"] += sum(tally.files for tally in report.files.values())
    counts["put back"] += report.put_back
    assert not report.unreadable
