"""What caches take on the disk, which of it is theirs alone, and when each was last used.

Counted are all files of the blocks that a manifest names, as they are on the disk now. Each folder
is listed once, however many caches go through it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvq.store import layout
from kvq.store.disk import store_errors
from kvq.store.layout import BlockName
from kvq.store.manifest import Manifest

#: Folders listed at once: on a network share each answer takes a while.
_THREADS = 16

#: A block within a store: its space, its parent's key and its own.
_Place = tuple[str, bytes, bytes]


@dataclass(frozen=True, kw_only=True)
class File:
    """A file on the disk that belongs to the block of tokens `start` to `end`.

    `mtime` is seconds since 1970, `nbytes` its size.
    """

    path: Path
    record: str
    start: int
    end: int
    nbytes: int
    mtime: float


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one cache takes.

    `nbytes` are those of all files of its blocks, `own_bytes` those that no other cache reaches:
    what collecting it would free. `missing` counts blocks without their records, which cut a
    restore short. `used` is seconds since 1970.
    """

    nbytes: int
    own_bytes: int
    files: int
    missing: int
    used: float

    @property
    def shared_bytes(self) -> int:
        """Bytes that another cache reaches too."""
        return self.nbytes - self.own_bytes


@dataclass(frozen=True, kw_only=True)
class Footprints:
    """By name of the cache; `nbytes` are those of all their files, shared ones counted once."""

    of: dict[str, Footprint]
    nbytes: int


def footprints(store: Path, manifests: Iterable[Manifest]) -> Footprints:
    """The footprints of all caches of the store at `store`.

    `manifests` must be all of them: what is one's own depends on the others. Raises
    StoreUnavailable.
    """
    every = list(manifests)
    blocks = {one.name: _places(one) for one in every}
    owners = Counter(place for places in blocks.values() for place in places)
    folders = {(space, parent) for space, parent, _ in owners}
    files = _files(store, folders)
    found = {one.name: _footprint(one, blocks[one.name], owners, files) for one in every}
    return Footprints(
        of=found, nbytes=sum(file.nbytes for place in owners for file in files.get(place, ()))
    )


def files_of(store: Path, manifest: Manifest) -> list[File]:
    """The files of one cache's blocks, in order of its tokens. Raises StoreUnavailable."""
    folders = {(manifest.space, block.parent) for block in manifest.blocks()}
    found = _files(store, folders)
    ends = _ends(manifest)
    return [
        File(
            path=file.path,
            record=file.record,
            start=ends[block.key] - block.n,
            end=ends[block.key],
            nbytes=file.nbytes,
            mtime=file.mtime,
        )
        for block in manifest.blocks()
        for file in found.get((manifest.space, block.parent, block.key), ())
    ]


@dataclass(frozen=True, kw_only=True)
class _Found:
    path: Path
    record: str
    nbytes: int
    mtime: float


def _places(manifest: Manifest) -> frozenset[_Place]:
    return frozenset((manifest.space, block.parent, block.key) for block in manifest.blocks())


def _footprint(
    manifest: Manifest,
    places: frozenset[_Place],
    owners: Counter[_Place],
    files: dict[_Place, list[_Found]],
) -> Footprint:
    mine = [file for place in places for file in files.get(place, ())]
    own = [file for place in places if owners[place] == 1 for file in files.get(place, ())]
    return Footprint(
        nbytes=sum(file.nbytes for file in mine),
        own_bytes=sum(file.nbytes for file in own),
        files=len(mine),
        missing=sum(all(file.record != "kv" for file in files.get(place, ())) for place in places),
        used=max([manifest.created, *(file.mtime for file in own if file.record == "kv")]),
    )


def _ends(manifest: Manifest) -> dict[bytes, int]:
    """Position (tokens) at which each block ends."""
    ends: dict[bytes, int] = {}
    position = 0
    chain = manifest.blocks()[: len(manifest.chain)]
    for block in chain:
        position += block.n
        ends[block.key] = position
    branches = manifest.blocks()[len(manifest.chain) :]
    for (position, _), block in zip(manifest.branches, branches, strict=True):
        ends[block.key] = position
    return ends


def _files(store: Path, folders: set[tuple[str, bytes]]) -> dict[_Place, list[_Found]]:
    """The block files in some (space, node) folders, by block."""
    found: dict[_Place, list[_Found]] = {}
    with store_errors(store), ThreadPoolExecutor(_THREADS) as pool:
        for (space, node), listed in pool.map(lambda one: (one, _list(store, *one)), folders):
            for block, file in listed:
                found.setdefault((space, node, block.key), []).append(file)
    return found


def _list(store: Path, space: str, node: bytes) -> list[tuple[BlockName, _Found]]:
    return list(_scan(layout.node_dir(layout.spaces_dir(store) / space, node), node))


def _scan(folder: Path, node: bytes) -> Iterator[tuple[BlockName, _Found]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                parsed = layout.parse_name(node, entry.name)
                if parsed is None:
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # collected meanwhile
                    continue
                yield (
                    parsed.block,
                    _Found(
                        path=folder / entry.name,
                        record=parsed.record,
                        nbytes=facts.st_size,
                        mtime=facts.st_mtime,
                    ),
                )
    except (FileNotFoundError, NotADirectoryError):
        return
