"""The children of a node of the trie: which of them can begin like a prompt, told by their names.

One directory listing and no open: a name has a code of the block's first tokens, and the key of a
block that ends inside the prompt follows from the prompt.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvq.store.keys import FIRST_TOKENS, TokenIds, child_key, first_code
from kvq.store.layout import BlockName, node_dir, parse_name


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A stored block that may begin like the prompt.

    It shares at most `bound` tokens with it, and all of its own exactly if it is `whole`.
    """

    block: BlockName
    bound: int
    whole: bool
    has_window: bool


@dataclass(frozen=True, kw_only=True)
class Children:
    """How many blocks follow a node, and those that can share tokens, the most promising first."""

    count: int
    candidates: tuple[Candidate, ...]


def list_children(space: Path, node: bytes, rest: TokenIds) -> Children:
    """The children of `node` in the space folder `space`; `rest` is the prompt after the node.

    Raises OSError, but not for a node without children.
    """
    try:
        names = os.listdir(node_dir(space, node))
    except (FileNotFoundError, NotADirectoryError):
        return Children(count=0, candidates=())
    parsed = [one for name in names if (one := parse_name(node, name)) is not None]
    blocks = [one.block for one in parsed if one.record == "kv" and not one.checkpoint]
    windows = {one.block.key for one in parsed if one.record == "window"}
    code = first_code(rest)
    keys: dict[int, bytes] = {}
    found = []
    for block in blocks:
        bound = _bound(block, code, len(rest))
        whole = bound == block.n
        if whole:
            if block.n not in keys:
                keys[block.n] = child_key(node, rest[: block.n])
            whole = keys[block.n] == block.key
            bound -= not whole
        if bound:
            window = block.key in windows
            found.append(Candidate(block=block, bound=bound, whole=whole, has_window=window))
    found.sort(key=lambda one: (one.bound, one.whole, one.block.key), reverse=True)
    return Children(count=len(blocks), candidates=tuple(found))


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
