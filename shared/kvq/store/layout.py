"""Where things are in a store: pure functions from keys to paths and back.

STORE/kvq-store.json
STORE/spaces/<space>/space.json
STORE/spaces/<space>/nodes/<aa>/<parent>/<child>.<n>.<first>[.<record>].safetensors
STORE/caches/<name>.json
STORE/quarantine/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvq.store.keys import BLOCK, TokenIds, child_key, first_code

STORE_FILE = "kvq-store.json"
SPACE_FILE = "space.json"
SUFFIX = ".safetensors"

#: What a file holds of its block's tokens. "kv" has no word of its own in the file name.
RECORDS = ("kv", "window", "state", "logits")
#: Checkpoint records: same content as `window` and `state`, kept only until their job is done.
CHECKPOINT = ".ckpt"

_NAME = re.compile(
    r"(?P<key>[0-9a-f]{40})\.(?P<n>[1-9][0-9]{0,2})\.(?P<first>[a-z2-7]{1,16})"
    r"(?:\.(?P<record>window|state|logits))?(?P<ckpt>\.ckpt)?\.safetensors"
)


@dataclass(frozen=True, kw_only=True)
class BlockName:
    """One block of the trie: `n` tokens (1..256) after the node `parent`."""

    parent: bytes
    key: bytes
    n: int
    first: str

    @classmethod
    def of(cls, parent: bytes, token_ids: TokenIds) -> BlockName:
        """Name of the block that holds `token_ids` (1..256 of them) after `parent`."""
        return cls(
            parent=parent,
            key=child_key(parent, token_ids),
            n=len(token_ids),
            first=first_code(token_ids),
        )

    @property
    def stem(self) -> str:
        """What the names of all its files begin with."""
        return f"{self.key.hex()}.{self.n}.{self.first}"

    def file(self, record: str = "kv", *, checkpoint: bool = False) -> str:
        """File name of one record of this block, within the parent's directory."""
        word = "" if record == "kv" else f".{record}"
        mark = CHECKPOINT if checkpoint else ""
        return f"{self.stem}{word}{mark}{SUFFIX}"


@dataclass(frozen=True, kw_only=True)
class ParsedName:
    """What a block file's name says."""

    block: BlockName
    record: str
    checkpoint: bool


def parse_name(parent: bytes, name: str) -> ParsedName | None:
    """The block that the file `name` in the directory of `parent` belongs to.

    None when `name` is not a block file's (a temp file, something foreign).
    """
    found = _NAME.fullmatch(name)
    if found is None or int(found["n"]) > BLOCK:
        return None
    return ParsedName(
        block=BlockName(
            parent=parent,
            key=bytes.fromhex(found["key"]),
            n=int(found["n"]),
            first=found["first"],
        ),
        record=found["record"] or "kv",
        checkpoint=found["ckpt"] is not None,
    )


def parse_stem(parent: bytes, stem: str) -> BlockName:
    """The block whose `kv` file in the directory of `parent` is `stem` and the suffix.

    Raises ValueError when `stem` is not a block's.
    """
    parsed = parse_name(parent, stem + SUFFIX)
    if parsed is None or parsed.record != "kv" or parsed.checkpoint:
        raise ValueError(f"{stem!r} is not the name of a block")
    return parsed.block


def spaces_dir(store: Path) -> Path:
    return store / "spaces"


def caches_dir(store: Path) -> Path:
    return store / "caches"


def quarantine_dir(store: Path) -> Path:
    return store / "quarantine"


def node_dir(space: Path, node: bytes) -> Path:
    """Directory of the children of `node`."""
    name = node.hex()
    return space.joinpath("nodes", name[:2], name)


def block_path(space: Path, block: BlockName, record: str = "kv", *, ckpt: bool = False) -> Path:
    """Path of one record file of `block`."""
    node = block.parent.hex()
    return space.joinpath("nodes", node[:2], node, block.file(record, checkpoint=ckpt))


def quarantine_note(file: Path) -> Path:
    """Where the reason of the quarantined `file` stands."""
    return file.with_name(f"{file.name}.json")


def manifest_path(store: Path, name: str) -> Path:
    return caches_dir(store) / f"{name}.json"
