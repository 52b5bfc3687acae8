"""Following token ids down the trie: which stored blocks begin the same way.

Reads names and headers only, never a tensor. A full block's name follows from the ids, so each
step is one open; only the last directory is listed, to end a match inside a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvq.errors import DamagedFile
from kvq.store.blockfile import Header, read_header
from kvq.store.children import Candidate, Children, list_children
from kvq.store.keys import BLOCK, ROOT, TokenIds, child_key, common_prefix
from kvq.store.layout import BlockName, block_path


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stored block whose first `common` tokens (1..n) are the prompt's at `start`."""

    block: BlockName
    start: int
    common: int
    header: Header

    @property
    def end(self) -> int:
        """Position (tokens) up to which the prompt and the block agree."""
        return self.start + self.common

    @property
    def whole(self) -> bool:
        """Whether the prompt holds every token of the block."""
        return self.common == self.block.n


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Where the ids lead in one space.

    `chain` are the full blocks from token 0 on. `children` are those of the last of them, `tails`
    the ones among them that were opened and share at least one more token, the longest first.
    `damaged` are files that stopped the way. `avoid` are files, each with the reason, that are
    treated as damaged.
    """

    space: Path
    ids: TokenIds
    chain: tuple[Step, ...]
    children: Children
    tails: tuple[Step, ...]
    damaged: tuple[DamagedFile, ...]
    avoid: Mapping[Path, str] = field(default_factory=dict)

    @property
    def extent(self) -> int:
        """Tokens that the prompt shares with what is stored."""
        if self.tails:
            return self.tails[0].end
        return self.chain[-1].end if self.chain else 0

    def node(self, number: int) -> bytes:
        """Key of the node after the first `number` blocks of the chain."""
        return self.chain[number - 1].block.key if number else ROOT

    def children_of(self, number: int) -> Children:
        """Children of that node, with the prompt's tokens after it. Raises OSError."""
        if number == len(self.chain):
            return self.children
        return list_children(self.space, self.node(number), self.ids[number * BLOCK :])

    def open(self, candidate: Candidate, start: int) -> Step | None:
        """The candidate at `start` as a step; None when it shares nothing or is gone.

        Raises DamagedFile, UnsupportedFormat, OSError.
        """
        return open_step(self.space, candidate, self.ids, start, self.avoid)


def walk(space: Path, ids: TokenIds, avoid: Mapping[Path, str] | None = None) -> Walk:
    """Follow `ids` down the trie of the space folder `space`. Raises OSError, UnsupportedFormat."""
    avoid = avoid or {}
    chain: list[Step] = []
    damaged: list[DamagedFile] = []
    node, start = ROOT, 0
    while len(ids) - start >= BLOCK:
        block = BlockName.of(node, ids[start : start + BLOCK])
        try:
            header = _open(space, block, start, avoid, ids[start : start + BLOCK])
        except FileNotFoundError:
            break
        except DamagedFile as error:
            damaged.append(error)
            break
        chain.append(Step(block=block, start=start, common=BLOCK, header=header))
        node, start = block.key, start + BLOCK
    children = list_children(space, node, ids[start:])
    bad = {Path(error.path) for error in damaged}
    candidates = [one for one in children.candidates if block_path(space, one.block) not in bad]
    tails = _open_longest(space, candidates, ids, start, damaged, avoid)
    return Walk(
        space=space,
        ids=ids,
        chain=tuple(chain),
        children=children,
        tails=tuple(tails),
        damaged=tuple(damaged),
        avoid=avoid,
    )


def open_step(
    space: Path, candidate: Candidate, ids: TokenIds, start: int, avoid: Mapping[Path, str]
) -> Step | None:
    """See `Walk.open`."""
    try:
        header = _open(space, candidate.block, start, avoid)
    except FileNotFoundError:
        return None
    common = common_prefix(header.meta.token_ids, ids[start:])
    if common == 0:
        return None
    return Step(block=candidate.block, start=start, common=common, header=header)


def _open_longest(
    space: Path,
    candidates: Sequence[Candidate],
    ids: TokenIds,
    start: int,
    damaged: list[DamagedFile],
    avoid: Mapping[Path, str],
) -> list[Step]:
    """Those with the longest shared prefix, and what was opened to find them; adds to `damaged`."""
    found: list[Step] = []
    best = 0
    for candidate in candidates:
        if candidate.bound <= best:
            break
        try:
            step = open_step(space, candidate, ids, start, avoid)
        except DamagedFile as error:
            damaged.append(error)
            continue
        if step is not None:
            found.append(step)
            best = max(best, step.common)
    found.sort(key=lambda step: (step.common, step.whole), reverse=True)
    return found


def _open(
    space: Path,
    block: BlockName,
    start: int,
    avoid: Mapping[Path, str],
    expected: TokenIds | None = None,
) -> Header:
    """The verified header of a block's `kv` file: right place, right tokens, right key.

    Where the block's name was made of the `expected` ids, comparing those is enough.
    """
    path = block_path(space, block)
    if avoid and path in avoid:
        raise DamagedFile(str(path), avoid[path])
    header = read_header(path)
    meta = header.meta
    if (
        meta.record != "kv"
        or meta.space != space.name
        or meta.parent != block.parent
        or meta.start != start
        or len(meta.token_ids) != block.n
        or not (
            child_key(meta.parent, meta.token_ids) == block.key
            if expected is None
            else np.array_equal(meta.token_ids, expected)
        )
    ):
        raise DamagedFile(str(header.path), "the header does not belong to the file's name")
    return header
