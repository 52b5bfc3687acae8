"""Following token ids down the trie: which stored blocks begin the same way.

Reads names and headers only, never a tensor. A full block's name follows from the ids, so each
step is one open; only the last directory is listed, to end a match inside a block.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import DamagedFile
from kvq.store.blockfile import Header, read_header
from kvq.store.keys import BLOCK, FIRST_TOKENS, ROOT, TokenIds, child_key, common_prefix, first_code
from kvq.store.layout import BlockName, block_path, node_dir, parse_name


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

    `chain` are the full blocks from token 0 on. `tails` are children of the last of them that share
    at least one more token, the longest first. `damaged` are files that stopped the way.
    """

    space: Path
    ids: TokenIds
    chain: tuple[Step, ...]
    tails: tuple[Step, ...]
    damaged: tuple[DamagedFile, ...]
    #: Whether the node where the way ended has children at all.
    has_children: bool

    @property
    def extent(self) -> int:
        """Tokens that the prompt shares with what is stored."""
        if self.tails:
            return self.tails[0].end
        return self.chain[-1].end if self.chain else 0


def walk(space: Path, ids: TokenIds) -> Walk:
    """Follow `ids` down the trie of the space folder `space`. Raises OSError, UnsupportedFormat."""
    chain: list[Step] = []
    damaged: list[DamagedFile] = []
    node, start = ROOT, 0
    while len(ids) - start >= BLOCK:
        block = BlockName.of(node, ids[start : start + BLOCK])
        try:
            header = _open(space, block, start)
        except FileNotFoundError:
            break
        except DamagedFile as error:
            damaged.append(error)
            break
        chain.append(Step(block=block, start=start, common=BLOCK, header=header))
        node, start = block.key, start + BLOCK
    tails, has_children = _tails(space, node, ids[start:], start, damaged)
    return Walk(
        space=space,
        ids=ids,
        chain=tuple(chain),
        tails=tuple(tails),
        damaged=tuple(damaged),
        has_children=has_children,
    )


def _tails(
    space: Path, node: bytes, rest: TokenIds, start: int, damaged: list[DamagedFile]
) -> tuple[list[Step], bool]:
    """Children of `node` that share tokens with `rest`, the longest first; whether any exist."""
    try:
        names = os.listdir(node_dir(space, node))
    except (FileNotFoundError, NotADirectoryError):
        return [], False
    code = first_code(rest)
    children = [parsed.block for name in names if (parsed := parse_name(node, name))]
    bad = {Path(error.path).name for error in damaged}
    blocks = {block for block in children if block.file() in names and block.file() not in bad}
    bounds = sorted(
        ((_bound(block, code, len(rest)), block.n, block.key, block) for block in blocks),
        reverse=True,
    )
    found: list[Step] = []
    best = 0
    for bound, n, _, block in bounds:
        # A block that ends inside the prompt can have kept a state at its end: look at each.
        if bound == 0 or (bound <= best and n > bound):
            continue
        try:
            header = _open(space, block, start)
        except FileNotFoundError:
            continue
        except DamagedFile as error:
            damaged.append(error)
            continue
        common = common_prefix(header.meta.token_ids, rest)
        if common:
            found.append(Step(block=block, start=start, common=common, header=header))
            best = max(best, common)
    found.sort(key=lambda step: (step.common, step.whole), reverse=True)
    return found, bool(blocks)


def _bound(block: BlockName, code: str, rest: int) -> int:
    """At most how many tokens `block` can share with a prompt whose next tokens have `code`."""
    shared = 0
    for ours, theirs in zip(code, block.first, strict=False):
        if ours != theirs:
            break
        shared += 1
    if shared < min(len(block.first), FIRST_TOKENS):
        return shared
    return min(block.n, rest)


def _open(space: Path, block: BlockName, start: int) -> Header:
    """The verified header of a block's `kv` file: right place, right tokens, right key."""
    header = read_header(block_path(space, block))
    meta = header.meta
    if (
        meta.record != "kv"
        or meta.space != space.name
        or meta.parent != block.parent
        or meta.start != start
        or len(meta.token_ids) != block.n
        or child_key(meta.parent, meta.token_ids) != block.key
    ):
        raise DamagedFile(str(header.path), "the header does not belong to the file's name")
    return header
