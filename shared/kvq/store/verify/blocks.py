"""Checking block files: digests, and that each is what its name and its directory say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvq.errors import DamagedFile, UnsupportedFormat
from kvq.store.blockfile import Header, check_data, read_header
from kvq.store.census import BlockFile, Node
from kvq.store.keys import BLOCK, ROOT
from kvq.store.layout import BlockName


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCheck:
    """A block file to check."""

    file: BlockFile
    space: str
    block: BlockName
    deep: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What one file said. `start` is its block's position (tokens), None when it is not known."""

    start: int | None = None
    nbytes: int = 0
    damage: DamagedFile | None = None
    newer: str = ""
    unreadable: str = ""


def check_file(work: FileCheck) -> Checked:
    """Check one file; never raises for what is wrong with it. Runs on any thread."""
    path = work.file.path
    try:
        header = read_header(path)
        _check_name(header, work)
        if work.deep:
            check_data(header)
    except FileNotFoundError:  # swept, or replaced, which checks itself
        return Checked()
    except DamagedFile as damage:
        return Checked(damage=damage)
    except UnsupportedFormat as error:
        return Checked(newer=str(error))
    except OSError as error:
        return Checked(unreadable=error.strerror or str(error))
    return Checked(start=header.meta.start, nbytes=header.data_bytes if work.deep else 0)


def _check_name(header: Header, work: FileCheck) -> None:
    meta, block = header.meta, work.block
    said = BlockName.of(meta.parent, meta.token_ids)
    if said != block or meta.record != work.file.record or meta.space != work.space:
        raise DamagedFile(str(header.path), "the header does not belong to the file's name")
    if meta.start % BLOCK or (block.parent == ROOT) != (meta.start == 0):
        raise DamagedFile(str(header.path), f"no block can start at token {meta.start}")
    if meta.low >= block.n or (meta.low and meta.record != "window"):
        raise DamagedFile(str(header.path), f"its rows start at token {meta.low} of {block.n}")


@dataclass
class Links:
    """Where blocks start, by space and key, to check that each leads to its children.

    Takes some 150 bytes a full block.
    """

    #: Position (tokens) at which each sound full block starts.
    starts: dict[tuple[str, bytes], int] = field(default_factory=dict)
    #: Nodes that have children: (space, key) -> (position, directory).
    parents: dict[tuple[str, bytes], tuple[int, Path]] = field(default_factory=dict)

    def add(self, node: Node, block: BlockName, start: int) -> None:
        """A sound kv file of `block`, a child of `node`."""
        if block.n == BLOCK:
            self.starts[node.space, block.key] = start
        self.parents.setdefault((node.space, node.key), (start, node.path))

    def broken(self) -> Iterator[tuple[Path, str]]:
        """(directory, what is wrong) of nodes whose block is missing or ends elsewhere."""
        for place, (start, path) in self.parents.items():
            if place[1] == ROOT:
                continue
            before = self.starts.get(place)
            if before is None:
                yield path, "no sound full block leads here"
            elif before + BLOCK != start:
                yield path, f"its blocks say {start} tokens, the block before {before + BLOCK}"
