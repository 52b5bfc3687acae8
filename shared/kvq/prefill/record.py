"""What manifests know of blocks that a prompt finds stored: above all, their measured quality."""

from __future__ import annotations

import contextlib

from kvq.errors import CacheNotFound, DamagedFile, UnsupportedFormat
from kvq.store.manifest import Manifest
from kvq.store.match import Match
from kvq.store.store import Store


class Records:
    """The manifests of a store by what they end with. Each is read once, however many ask."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[str] = set()
        #: Names of caches by their space and last block, which depends on all before it.
        self._names: dict[tuple[str, str], list[str]] = {}

    def of(self, match: Match, name: str) -> Manifest | None:
        """A manifest of the very blocks of `match`: that of `name`, or another; else None.

        Raises StoreUnavailable.
        """
        assert match.space is not None
        stems = match.stems()
        own = self._read(name)
        if own is not None and _is_of(own, match, stems):
            return own
        if match.space.codec == "raw":
            return None  # it has no quality to take over, so the search is not worth its time
        self._read_new()
        for other in self._names.get((match.space.digest, stems[-1]), ()):
            manifest = self._read(other)
            if manifest is not None and _is_of(manifest, match, stems):
                return manifest
        return None

    def _read_new(self) -> None:
        for name in self._store.names():
            if name in self._seen:
                continue
            self._seen.add(name)
            manifest = self._read(name)
            if manifest is not None and manifest.chain:
                key = manifest.space, manifest.chain[-1]
                self._names.setdefault(key, []).append(name)

    def _read(self, name: str) -> Manifest | None:
        with contextlib.suppress(CacheNotFound, DamagedFile, UnsupportedFormat):
            return self._store.manifest(name)
        return None


def _is_of(manifest: Manifest, match: Match, stems: tuple[str, ...]) -> bool:
    assert match.space is not None
    return manifest.space == match.space.digest and manifest.chain == stems
