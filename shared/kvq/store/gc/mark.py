"""Reading the manifests: which caches there are, and which blocks they name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvq.errors import CacheNotFound, DamagedFile, UnsupportedFormat
from kvq.store.layout import BlockName
from kvq.store.manifest import Manifest
from kvq.store.store import Store

#: A listing that changes more often than this while it is read is taken as it is.
_LISTINGS = 20


@dataclass(frozen=True, kw_only=True)
class Marked:
    """All manifests by name; of those that cannot be read, the reason."""

    readable: dict[str, Manifest]
    unreadable: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Live:
    """Blocks that a manifest names. A key alone tells a block from all others in its space."""

    keys: dict[str, set[bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> Live:
        live = cls()
        for manifest in manifests:
            keys = live.keys.setdefault(manifest.space, set())
            keys.update(block.key for block in manifest.blocks())
        return live

    def has(self, space: str, block: BlockName) -> bool:
        return block.key in self.keys.get(space, ())


def read_all(store: Store) -> Marked:
    """Every manifest, also one that is renamed meanwhile. Raises StoreUnavailable.

    A rename between listing a folder and reading a file can hide a cache under both its names, so
    the folder is listed until it stays as it was.
    """
    readable: dict[str, Manifest] = {}
    unreadable: dict[str, str] = {}
    before: list[str] | None = None
    for _ in range(_LISTINGS):
        names = store.names()
        if names == before:
            break
        before = names
        readable = {name: one for name, one in readable.items() if name in names}
        unreadable = {name: why for name, why in unreadable.items() if name in names}
        for name in names:
            if name in readable or name in unreadable:
                continue  # if it was replaced meanwhile, its blocks were touched
            try:
                readable[name] = store.manifest(name)
            except CacheNotFound:
                before = None
            except (DamagedFile, UnsupportedFormat) as error:
                unreadable[name] = str(error)
    return Marked(readable=readable, unreadable=unreadable)
