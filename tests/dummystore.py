"""A store without a model: blocks whose rows are a digest of all tokens up to them.

So a test can tell from any row whether it is the right one. Prompts are saved as the prefiller
does it, one file at a time, so that two writers can be interleaved at will.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvq.store import Manifest, Space, Store
from kvq.store.blockfile import BlockMeta, Header, Tensor, read_data, write_block
from kvq.store.disk import make_directory
from kvq.store.keys import BLOCK, ROOT, TokenIds, as_ids
from kvq.store.layout import BlockName, block_path
from kvq.store.restorable import RestorePlan
from kvq.store.space import Leaf

KV = Leaf(path=(0,), cache_class="KVCache", record="kv", keys=(1, 1), values=(1, 1))
STATE = Leaf(path=(2,), cache_class="ArraysCache", record="state", slots=1)


def window_leaf(window: int, keep: int = 0) -> Leaf:
    return Leaf(
        path=(1,),
        cache_class="RotatingKVCache",
        record="window",
        window=window,
        keep=keep,
        keys=(1, 1),
        values=(1, 1),
    )


def make_space(*leaves: Leaf, fingerprint: str = "f" * 40, codec: str = "raw") -> Space:
    return Space(fingerprint=fingerprint, dtype="float32", codec=codec, leaves=leaves)


KV_ONLY = make_space(KV)
WINDOWED = make_space(KV, window_leaf(64))
RECURRENT = make_space(KV, STATE)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One file that was written: which record of which block, and from which of its tokens on."""

    path: Path
    record: str
    #: The prompt's tokens up to the end of the block.
    prefix: tuple[int, ...]
    start: int
    low: int = 0

    @property
    def end(self) -> int:
        return len(self.prefix)


def rows_of(ids: Iterable[int]) -> np.ndarray:
    """One uint32 a token: a digest of the tokens up to it."""
    digest, rows = 0, []
    for token in ids:
        digest = zlib.crc32(int(token).to_bytes(4, "little"), digest)
        rows.append(digest)
    return np.array(rows, np.uint32)


def blocks_of(ids: TokenIds) -> list[tuple[BlockName, int]]:
    """(block, start) of the chain of `ids`: full blocks, then the rest."""
    parent, found = ROOT, []
    for start in range(0, len(ids), BLOCK):
        block = BlockName.of(parent, ids[start : start + BLOCK])
        found.append((block, start))
        parent = block.key
    return found


def save_steps(
    store: Store,
    space: Space,
    token_ids: Sequence[int],
    *,
    kept: Sequence[int] = (),
    lows: int = 0,
) -> Iterator[Saved | None]:
    """Save a prompt, one file at each step; None after a file that was there already.

    Window records are written near kept positions, states at kept positions, as the recorder does.
    Between looking for a file and writing it there is a step too. `lows` is how many rows a window
    file lacks at its block's start.
    """
    ids = as_ids(token_ids)
    folder = store.add_space(space)
    needs = space.needs
    positions = sorted({*(p for p in kept if 0 < p < len(ids)), len(ids)})
    digests = rows_of(ids)

    def write(record: str, block: BlockName, start: int) -> Iterator[Saved | None]:
        path = block_path(folder, block, record)
        if path.exists():
            yield None
            return
        yield None
        low = min(lows, block.n - 1) if record == "window" and start else 0
        rows = digests[start + low : start + block.n]
        publish(path, space, block, ids, start, record, rows, low=low)
        yield Saved(
            path=path,
            record=record,
            prefix=tuple(int(t) for t in ids[: start + block.n]),
            start=start,
            low=low,
        )

    chain = blocks_of(ids)
    branches = []
    if needs.state:
        for position in positions[:-1]:
            if position % BLOCK:
                branches.append(blocks_of(ids[:position])[-1])
    for block, start in (*chain, *branches):
        end = start + block.n
        yield from write("kv", block, start)
        reach = needs.window + BLOCK
        near = any(start < p and end > p - reach for p in positions) or start < needs.keep
        if needs.window and near:
            yield from write("window", block, start)
        if needs.state and end in positions:
            yield from write("state", block, start)
        if end == len(ids):
            yield from write("logits", block, start)


def save(store: Store, space: Space, token_ids: Sequence[int], **how: object) -> list[Saved]:
    """Save a prompt; the files that were new."""
    return [one for one in save_steps(store, space, token_ids, **how) if one is not None]


def save_cache(
    store: Store,
    space: Space,
    name: str,
    token_ids: Sequence[int],
    *,
    kept: Sequence[int] = (),
    **facts: object,
) -> Manifest:
    """Save a prompt and its manifest."""
    save(store, space, token_ids, kept=kept)
    manifest = manifest_of(store, space, name, token_ids, kept=kept, **facts)
    store.write_manifest(manifest)
    return manifest


def manifest_of(
    store: Store,
    space: Space,
    name: str,
    token_ids: Sequence[int],
    *,
    kept: Sequence[int] = (),
    **facts: object,
) -> Manifest:
    ids = as_ids(token_ids)
    positions = sorted({*kept, len(ids)})
    inside = [p for p in positions if p % BLOCK and p < len(ids) and space.needs.state]
    match = store.match(space.fingerprint, ids, codecs=[space.codec])
    return Manifest(
        **{
            "name": name,
            "space": space.digest,
            "fingerprint": space.fingerprint,
            "model": "dummy",
            "codec": space.codec,
            "dtype": space.dtype,
            "tokens": len(ids),
            "chain": tuple(block.stem for block, _ in blocks_of(ids)),
            "branches": tuple((p, blocks_of(ids[:p])[-1][0].stem) for p in inside),
            "kept": tuple(positions),
            "nbytes": match.nbytes,
            "created": 1_700_000_000.0,
            "prefill_seconds": len(ids) / 100,
            **facts,
        }
    )


def publish(
    path: Path,
    space: Space,
    block: BlockName,
    ids: TokenIds,
    start: int,
    record: str,
    rows: np.ndarray,
    *,
    low: int = 0,
) -> int:
    """Write one block file whose tensors hold `rows`; its size."""
    make_directory(path.parent)
    meta = BlockMeta(
        record=record,
        space=space.digest,
        parent=block.parent,
        token_ids=ids[start : start + block.n],
        start=start,
        low=low,
        groups=({"leaves": [0]},),
    )
    shape = (1, 1, len(rows), 1)
    if record in ("state", "logits"):
        rows, shape = rows[-1:], (1,)
    data = rows.astype("<u4").tobytes()
    tensors = [
        Tensor(name=name, dtype="U32", shape=shape, data=data) for name in _tensor_names(record)
    ]
    return write_block(path, meta, tensors, durable=False)


def check_plan(plan: RestorePlan, ids: Sequence[int], space: Space) -> None:
    """Read all that a restore reads; assert that each row is the one that `ids` call for.

    Raises what reading raises.
    """
    expected = rows_of(ids[: plan.tokens])
    assert len(expected) == plan.tokens
    seen = np.zeros(plan.tokens, bool)
    for part in plan.kv:
        for rows in _tensors(part.header):
            np.testing.assert_array_equal(
                rows[part.low : part.high], expected[part.start : part.start + part.high - part.low]
            )
        seen[part.start : part.start + part.high - part.low] = True
    assert seen.all()
    needs = space.needs
    if needs.window:
        seen[:] = False
        for part in plan.window:
            low, count = part.low - part.header.meta.low, part.high - part.low
            for rows in _tensors(part.header):
                np.testing.assert_array_equal(
                    rows[low : low + count], expected[part.start : part.start + count]
                )
            seen[part.start : part.start + count] = True
        assert seen[-needs.window :].all()
        assert seen[: needs.keep].all()
    if needs.state and plan.tokens:
        assert plan.state is not None
        assert _tensors(plan.state)[0][0] == expected[-1]
    if plan.logits is not None:
        assert _tensors(plan.logits)[0][0] == expected[-1]


def _tensor_names(record: str) -> tuple[str, ...]:
    return {"state": ("2.0",), "logits": ("logits",)}.get(record, ("0.k", "0.v"))


def _tensors(header: Header) -> list[np.ndarray]:
    data = read_data(header)
    return [data[t.start : t.end].view("<u4") for t in header.tensors.values()]


def age(folder: Path, seconds: float) -> None:
    """Make every file below `folder` so much older."""
    for path in folder.rglob("*"):
        if path.is_file():
            stamp = path.stat().st_mtime - seconds
            os.utime(path, (stamp, stamp))


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}
