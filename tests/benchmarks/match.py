"""`match`: finding the longest stored prefix among many blocks, by names and headers alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import Ways, show
from kvq.store import Space, Store
from kvq.store.blockfile import BlockMeta, write_block
from kvq.store.keys import BLOCK, ROOT
from kvq.store.layout import BlockName, block_path


def run(blocks: int, tokens: int, *, runs: int, folder: str | None) -> None:
    """Print how long matches take in a store of `blocks` blocks, for a prompt of `tokens`."""
    depth = tokens // BLOCK
    with tempfile.TemporaryDirectory(dir=folder) as temp:
        store = Store.create(Path(temp) / "store")
        space = Space(fingerprint="benchmark", dtype="bfloat16", codec="raw")
        place = store.add_space(space)
        random = np.random.default_rng(0)
        chains = -(-blocks // depth)
        ids = np.empty(0, np.uint32)
        for _ in range(chains):
            ids = random.integers(0, 150_000, depth * BLOCK).astype(np.uint32)
            _write_chain(place, ids)
        inside = ids.copy()
        inside[tokens // 2 :] += 1
        other = random.integers(0, 150_000, tokens).astype(np.uint32)
        assert store.match("benchmark", ids).tokens == tokens
        assert store.match("benchmark", inside).tokens == tokens // 2
        assert store.match("benchmark", other).tokens == 0
        ways = Ways(runs=runs)
        ways.add("all of the prompt is stored", lambda: store.match("benchmark", ids))
        ways.add("it parts half way", lambda: store.match("benchmark", inside))
        ways.add("nothing of it is stored", lambda: store.match("benchmark", other))
        title = f"match {tokens} token ids among {chains * depth} blocks"
        show(title, ways.time(), against="all of the prompt is stored")


def _write_chain(place: Path, ids: np.ndarray) -> None:
    parent = ROOT
    for start in range(0, len(ids), BLOCK):
        part = ids[start : start + BLOCK]
        block = BlockName.of(parent, part)
        path = block_path(place, block)
        path.parent.mkdir(parents=True, exist_ok=True)
        meta = BlockMeta(record="kv", space=place.name, parent=parent, token_ids=part, start=start)
        write_block(path, meta, [], durable=False)
        parent = block.key
