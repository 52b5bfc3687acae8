"""The manifest of a finished prefill."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvq.model.loading import LoadedModel
from kvq.prefill.request import PrefillOutcome, PrefillRequest
from kvq.prefill.schedule import kept_positions
from kvq.store.keys import BLOCK, ROOT, chain_keys
from kvq.store.layout import BlockName
from kvq.store.manifest import Manifest
from kvq.store.match import Match
from kvq.store.store import Store


def publish(
    store: Store,
    llm: LoadedModel,
    request: PrefillRequest,
    match: Match,
    outcome: PrefillOutcome,
) -> bool:
    """Write the manifest that makes the cache complete, and hold its blocks for it.

    False, and no manifest, when a sweep has taken a block meanwhile. Raises StoreUnavailable.
    """
    assert match.space is not None
    assert request.name is not None
    now = time.time()
    kept = kept_positions(outcome.tokens, request.keep, request.keep_every)
    manifest = Manifest(
        name=request.name,
        space=outcome.space,
        fingerprint=llm.fingerprint,
        model=llm.name,
        codec=outcome.codec,
        dtype=match.space.dtype,
        tokens=outcome.tokens,
        chain=match.stems(),
        branches=_branches(match, kept),
        kept=kept,
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
    return store.publish_held(manifest)


def _branches(match: Match, kept: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """(position, stem) of the blocks that hold the states kept inside full blocks of the chain."""
    assert match.space is not None
    if not match.space.needs.state:
        return ()
    keys = [ROOT, *chain_keys(match.ids)]
    return tuple(
        (at, BlockName.of(keys[at // BLOCK], match.ids[at // BLOCK * BLOCK : at]).stem)
        for at in kept
        if at % BLOCK and at < match.tokens
    )
