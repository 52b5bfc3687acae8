"""Every file of a store's spaces, directory by directory. Opens none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvq.store import layout
from kvq.store.disk import TEMP_PREFIX
from kvq.store.layout import BlockName
from kvq.store.parallel import ordered

#: A file that a sweep has moved aside, to be removed if nobody turns out to need it.
ASIDE_PREFIX = ".gc-"

#: Directories listed at once: on a network share each answer takes a while.
_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file as its directory has it. Times are seconds since 1970."""

    path: Path
    nbytes: int
    mtime: float
    ctime: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFile(Entry):
    """One record of a block; checkpoints are kept only until their job is done."""

    record: str
    checkpoint: bool


@dataclass(kw_only=True)
class Node:
    """The directory of the children of one node, in the space whose folder is `space`."""

    space: str
    key: bytes
    path: Path
    blocks: dict[BlockName, list[BlockFile]] = field(default_factory=dict)
    #: Unfinished files of writers.
    temps: list[Entry] = field(default_factory=list)
    #: What a sweep has moved aside.
    aside: list[Entry] = field(default_factory=list)
    #: What no kvq wrote.
    foreign: list[Path] = field(default_factory=list)


def nodes(store: Path, *, threads: int = _THREADS) -> Iterator[Node]:
    """Every node directory of the store at `store`. What vanishes meanwhile is left out.

    Raises OSError.
    """
    for _, found in ordered(_list_nodes, _shelves(store), threads=threads, name="kvq-list"):
        yield from found


def loose_files(store: Path) -> Iterator[Entry]:
    """Unfinished files of writers outside the node directories."""
    spaces = list(subdirectories(layout.spaces_dir(store)))
    quarantine = layout.quarantine_dir(store)
    for folder in (store, layout.caches_dir(store), quarantine, *spaces):
        for name, entry in scan(folder):
            if name.startswith(TEMP_PREFIX):
                yield entry


def scan(folder: Path) -> Iterator[tuple[str, Entry]]:
    """(name, entry) of every file in `folder`; nothing when it is not there. Raises OSError."""
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for one in entries:
            with contextlib.suppress(FileNotFoundError):
                if one.is_file(follow_symlinks=False):
                    facts = one.stat(follow_symlinks=False)
                    yield (
                        one.name,
                        Entry(
                            path=folder / one.name,
                            nbytes=facts.st_size,
                            mtime=facts.st_mtime,
                            ctime=facts.st_ctime,
                        ),
                    )


def subdirectories(folder: Path) -> Iterator[Path]:
    """The directories in `folder`, in order; none when it is not there. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        yield folder / name


def _shelves(store: Path) -> Iterator[Path]:
    """The directories that hold node directories, each about a 256th of a space."""
    for space in subdirectories(layout.spaces_dir(store)):
        yield from subdirectories(space / "nodes")


def _list_nodes(shelf: Path) -> list[Node]:
    space = shelf.parent.parent.name
    return [
        _list_node(space, key, folder)
        for folder in subdirectories(shelf)
        if (key := _node_key(folder.name)) is not None
    ]


def _list_node(space: str, key: bytes, folder: Path) -> Node:
    node = Node(space=space, key=key, path=folder)
    for name, entry in scan(folder):
        parsed = layout.parse_name(key, name)
        if parsed is not None:
            file = BlockFile(
                path=entry.path,
                nbytes=entry.nbytes,
                mtime=entry.mtime,
                ctime=entry.ctime,
                record=parsed.record,
                checkpoint=parsed.checkpoint,
            )
            node.blocks.setdefault(parsed.block, []).append(file)
        elif name.startswith(TEMP_PREFIX):
            node.temps.append(entry)
        elif name.startswith(ASIDE_PREFIX):
            node.aside.append(entry)
        else:
            node.foreign.append(entry.path)
    return node


def _node_key(name: str) -> bytes | None:
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if key.hex() == name and len(key) == 20 else None
