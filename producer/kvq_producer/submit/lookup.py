"""What the store has already of the prompts of a batch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq.errors import CacheNotFound, DamagedFile, ModelError, UnsupportedFormat
from kvq.model.fingerprint import fingerprint
from kvq.model.folder import resolve
from kvq.queue.messages import CacheToWrite
from kvq.store.keys import BLOCK, KEY_BYTES, ROOT, TokenIds, chain_keys, child_key
from kvq.store.manifest import Manifest
from kvq.store.store import Store
from kvq_producer.plan import Group, Stored
from kvq_producer.submit.wish import Wanted, caches_of


class Lookup:
    """Asks `store` about prompts of models whose weights are on this machine.

    Without the weights a model's fingerprint is unknown; then nothing counts as stored, and the
    workers find out. `wanted` is what each custom id wants, complete when the planner asks. With
    `export`, the folder of stock files, a cache without its file there is not complete.
    """

    def __init__(
        self, store: Store, wanted: Mapping[str, Wanted], *, export: str | None = None
    ) -> None:
        self._store = store
        self._wanted = wanted
        self._export = None if export is None else Path(export)
        self._fingerprints: dict[tuple[str, str | None], str | None] = {}

    def __call__(self, group: Group, ids: TokenIds, custom_ids: tuple[str, ...]) -> Stored:
        digest = self._fingerprint(group)
        if digest is None:
            return Stored()
        match = self._store.match(digest, ids, codecs=_codecs(group))
        if match.tokens < len(ids) or not match.exact:
            return Stored(tokens=match.tokens)
        key = whole_key(ids)
        wanted = [self._wanted[one] for one in custom_ids]
        caches, _ = caches_of(wanted, group, key)
        keep = {position for one in wanted for position in one.keep}
        complete = all(
            self._is_there(cache, group, key, digest, keep) and self._is_exported(cache.name)
            for cache in caches
        )
        return Stored(tokens=match.tokens, complete=complete)

    def knows(self, group: Group) -> bool:
        """Whether what is stored of the group can be told here."""
        return self._fingerprint(group) is not None

    def facts(self, group: Group, name: str) -> dict[str, Any]:
        """What a result says of a cache that is stored already."""
        found = self._store.manifest(name)
        return {
            "store": str(self._store.path),
            **({} if self._export is None else {"export": str(self._export)}),
            "model": group.model,
            "space": found.space,
            "codec": found.codec,
            "tokens": found.tokens,
            "reused_tokens": found.tokens,
            "prefilled_tokens": 0,
            "lossy_prefix_tokens": found.lossy_prefix_tokens,
            "quality": dict(found.quality) if found.quality else None,
            "bytes": found.nbytes,
            "bytes_written": 0,
            "prefill_seconds": 0.0,
            "seconds": 0.0,
            "worker": found.worker,
        }

    def _is_there(
        self, cache: CacheToWrite, group: Group, key: bytes, digest: str, keep: set[int]
    ) -> bool:
        try:
            found = self._store.manifest(cache.name)
        except (CacheNotFound, DamagedFile, UnsupportedFormat):
            return False
        return (
            found.fingerprint == digest
            and found.codec in (_codecs(group) or [found.codec])
            and _last_key(found) == key
            and found.pinned == cache.pin
            and dict(found.metadata) == cache.metadata
            and _lives(found, cache.ttl)
            and keep <= set(found.kept)
        )

    def _is_exported(self, name: str) -> bool:
        return self._export is None or (self._export / f"{name}.safetensors").is_file()

    def _fingerprint(self, group: Group) -> str | None:
        which = (group.model, group.adapter)
        if which not in self._fingerprints:
            self._fingerprints[which] = _local_fingerprint(*which)
        return self._fingerprints[which]


def whole_key(ids: TokenIds) -> bytes:
    """Chain key of all of `ids`, a shorter last block included."""
    *_, last = (ROOT, *chain_keys(ids))
    rest = len(ids) % BLOCK
    return child_key(last, ids[-rest:]) if rest else last


def _codecs(group: Group) -> list[str] | None:
    return None if group.codec == "auto" else [group.codec]


def _last_key(manifest: Manifest) -> bytes:
    stem = manifest.chain[-1] if manifest.chain else ""
    try:
        key = bytes.fromhex(stem.split(".")[0])
    except ValueError:
        return b""
    return key if len(key) == KEY_BYTES else b""


def _lives(manifest: Manifest, ttl: float | None) -> bool:
    if manifest.expires is None:
        return ttl is None
    # Half of its life over, a cache that is wanted again is worth renewing.
    return ttl is not None and manifest.expires > time.time() + ttl / 2


def _local_fingerprint(model: str, adapter: str | None) -> str | None:
    try:
        folder: Path = resolve(model, weights=False)
        if not any(folder.glob("model*.safetensors")):
            return None
        return fingerprint(folder, adapter)
    except ModelError:
        return None
