"""The manifest of a finished prefill, and what earlier manifests know of the same blocks."""

from __future__ import annotations

import contextlib
import time

from kvq.errors import CacheNotFound, DamagedFile, UnsupportedFormat
from kvq.model.loading import LoadedModel
from kvq.prefill.request import PrefillOutcome, PrefillRequest
from kvq.prefill.schedule import kept_positions
from kvq.store.manifest import Manifest
from kvq.store.match import Match
from kvq.store.store import Store


def publish(
    store: Store,
    llm: LoadedModel,
    request: PrefillRequest,
    match: Match,
    outcome: PrefillOutcome,
) -> None:
    """Write the manifest that makes the cache complete. Raises StoreUnavailable."""
    assert match.space is not None
    assert request.name is not None
    now = time.time()
    store.write_manifest(
        Manifest(
            name=request.name,
            space=outcome.space,
            fingerprint=llm.fingerprint,
            model=llm.name,
            codec=outcome.codec,
            dtype=match.space.dtype,
            tokens=outcome.tokens,
            chain=match.stems(),
            kept=kept_positions(outcome.tokens, request.keep, request.keep_every),
            nbytes=outcome.bytes,
            created=now,
            expires=None if request.ttl is None else now + request.ttl,
            pinned=request.pin,
            prefill_seconds=outcome.prefill_seconds,
            reused_tokens=outcome.reused_tokens,
            lossy_prefix_tokens=outcome.lossy_prefix_tokens,
            quality=outcome.quality,
            notes=outcome.notes,
            worker=request.worker,
            metadata=request.metadata,
        )
    )


def on_record(store: Store, match: Match, name: str) -> Manifest | None:
    """A manifest of the very blocks of `match`: the one called `name`, or any other; else None."""
    assert match.space is not None
    space, stems = match.space, match.stems()

    def same(manifest: Manifest) -> bool:
        return manifest.space == space.digest and manifest.chain == stems

    with contextlib.suppress(CacheNotFound, DamagedFile, UnsupportedFormat):
        own = store.manifest(name)
        if same(own):
            return own
    if space.codec == "raw":
        return None  # it has no quality to take over, so the search is not worth its time
    return next((one for one in store.manifests() if same(one)), None)
