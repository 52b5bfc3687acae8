"""What manifests know of blocks that a prompt finds stored: above all, their measured quality."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvq.errors import CacheNotFound, DamagedFile, UnsupportedFormat
from kvq.store.disk import store_errors
from kvq.store.layout import manifest_path
from kvq.store.manifest import Manifest
from kvq.store.match import Match
from kvq.store.store import Store

#: When a manifest's file was written (ns), and its inode.
_Stamp = tuple[int, int]
#: A chain's space and last block.
_End = tuple[str, str]


class Records:
    """The manifests of a store by what they end with. Each is read once, until it changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: What was read of each file, and the space and last block, which depends on all before it.
        self._seen: dict[str, tuple[_Stamp, _End | None]] = {}
        self._names: dict[_End, set[str]] = {}

    def of(self, match: Match, name: str) -> Manifest | None:
        """A manifest of the very blocks of `match`: that of `name`, or another; else None.

        One that knows the quality goes before one that does not. Raises StoreUnavailable.
        """
        assert match.space is not None
        stems = match.stems()
        found = self._read(name, match, stems)
        if match.space.codec == "raw" or (found and found.quality):
            return found  # raw has no quality to take over, so a search is not worth its time
        self._read_new()
        for other in sorted(self._names.get((match.space.digest, stems[-1]), ())):
            manifest = self._read(other, match, stems)
            if manifest is not None and manifest.quality:
                return manifest
            found = found or manifest
        return found

    def _read_new(self) -> None:
        for name, stamp in self._stamps():
            if name in self._seen:
                before, end = self._seen[name]
                if before == stamp:
                    continue
                if end is not None:
                    self._names[end].discard(name)
            end = None
            with contextlib.suppress(CacheNotFound, DamagedFile, UnsupportedFormat):
                manifest = self._store.manifest(name)
                end = (manifest.space, manifest.chain[-1]) if manifest.chain else None
            self._seen[name] = stamp, end
            if end is not None:
                self._names.setdefault(end, set()).add(name)

    def _stamps(self) -> Iterator[tuple[str, _Stamp]]:
        """Every cache's name, and what changes when another manifest takes it."""
        with store_errors(self._store.path):
            for name in self._store.names():
                with contextlib.suppress(FileNotFoundError):
                    facts = manifest_path(self._store.path, name).stat()
                    yield name, (facts.st_mtime_ns, facts.st_ino)

    def _read(self, name: str, match: Match, stems: tuple[str, ...]) -> Manifest | None:
        with contextlib.suppress(CacheNotFound, DamagedFile, UnsupportedFormat):
            manifest = self._store.manifest(name)
            if _is_of(manifest, match, stems):
                return manifest
        return None


def _is_of(manifest: Manifest, match: Match, stems: tuple[str, ...]) -> bool:
    assert match.space is not None
    return manifest.space == match.space.digest and manifest.chain == stems
