"""Sweeps in a loop beside writers and readers: no live block goes, no reader errs."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from pathlib import Path

import gcrace
import mlx.core as mx
import numpy as np
import pytest
from oracle import as_loaded
from zoo import by_name, prompt

from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store
from kvq.store.gc import Policy, collect
from kvq.store.keys import as_ids

SECONDS = 10


@pytest.mark.slow
def test_processes_that_share_a_store(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    roles = [*[gcrace.writer] * 4, *[gcrace.reader] * 4, gcrace.sweeper]
    processes = [
        context.Process(target=gcrace.run, args=(role, str(store.path), seed, SECONDS, queue))
        for seed, role in enumerate(roles)
    ]
    for process in processes:
        process.start()
    reports = [queue.get(timeout=SECONDS + 100) for _ in processes]
    for process in processes:
        process.join(30)
    counts: Counter[str] = Counter()
    for role, counted, error in reports:
        assert error is None, f"{role}: {error}"
        counts.update(counted)
    for what in ("stored", "forgotten", "renamed", "caches read", "sweeps", "files removed"):
        assert counts[what] > 0, counts
    assert not list(store.path.rglob(".gc-*"))
    assert not (store.path / "quarantine").exists()


@pytest.mark.slow
def test_a_prefiller_whose_blocks_are_swept_as_soon_as_they_may(tmp_path: Path) -> None:
    """The grace period is shorter than a prefill: blocks of a running one go, and come again."""
    architecture = by_name("falcon_h1")
    store = Store.create(tmp_path / "store")
    prefiller = Prefiller(store, as_loaded(architecture), step=128)
    base = as_ids(prompt(architecture, 1200))
    over = threading.Event()
    failures: list[BaseException] = []

    def sweeping() -> None:
        while not over.wait(0.05):
            try:
                collect(store, Policy(grace=1.0, settle=0))
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=sweeping)
    thread.start()
    try:
        for number in range(6):
            ids = np.concatenate([base[: 300 * (1 + number % 3)], as_ids([7, 8, number])])
            prefiller.run(PrefillRequest(token_ids=ids[:-3], name=None, codec="raw"))
            request = PrefillRequest(token_ids=ids, name=f"c{number}", codec="raw", keep=(100,))
            prefiller.run(request)
            match = store.match(prefiller.llm.fingerprint, ids)
            restored = match.load(prefiller.llm.model)
            assert restored.tokens == len(ids)
            assert restored.logits is not None
            mx.eval(restored.logits)
            if number % 2:
                store.remove_manifest(f"c{number}")
    finally:
        over.set()
        thread.join(30)
    assert failures == []
    collect(store, Policy(grace=0.0, settle=0))
    for manifest in store.manifests():
        assert manifest.kept[0] == 100
    for number in (0, 2, 4):
        ids = np.concatenate([base[: 300 * (1 + number % 3)], as_ids([7, 8, number])])
        match = store.match(prefiller.llm.fingerprint, ids)
        assert match.exact
        assert match.plan_at(100).tokens == 100
