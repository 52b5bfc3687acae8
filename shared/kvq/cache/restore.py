"""Restoring: from the files of a match to the model's caches.

Nothing is returned unevaluated, and nothing of a file whose digest does not hold is ever used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvq.cache.adapters import adapter_of
from kvq.cache.container import KVCacheContainer
from kvq.cache.dtypes import from_safetensors, to_array
from kvq.cache.filling import fill
from kvq.cache.groups import Group, groups_of
from kvq.cache.landing import Landing, LiveLanding
from kvq.cache.leaves import leaf_caches
from kvq.cache.probe import unfit_layers
from kvq.codec import LayerCoding
from kvq.codec.live import mismatch
from kvq.errors import DamagedFile, UnsupportedModel
from kvq.store.blockfile import Header, read_data
from kvq.store.disk import store_errors, unavailable
from kvq.store.match import Match, match_in_space
from kvq.store.reason import ended_by_damage
from kvq.store.restorable import Part, RestorePlan
from kvq.store.space import Leaf, Space
from kvq.store.use import note_use


def restore(
    match: Match,
    model: Any,
    *,
    upto: int | None = None,
    live: bool = False,
    threads: int | None = None,
) -> KVCacheContainer:
    """The model's caches at `upto` tokens of the match; see `Match.load`.

    With `live`, layers stay quantized as they rest, where their codes are those that the model's
    attention can read (`q8`, unpadded; not where it fails a probe): less memory, no decoding. The
    others are decoded. `threads` read in parallel (default: the machine's cores, at most 16).
    """
    threads = threads or min(16, os.cpu_count() or 1)
    plan = match.plan_at(upto)
    avoid: dict[Path, str] = {}
    while True:
        try:
            caches = _restore(plan, match.space, model, threads, live)
            logits = _logits(plan.logits)
        except (DamagedFile, FileNotFoundError) as error:
            # A file is bad, or a sweep took it meanwhile: what is before it still stands.
            match = _match_without(match, error, avoid)
            plan = match.plan if upto is None else match.plan_upto(min(upto, match.resume_tokens))
            continue
        except OSError as error:
            raise unavailable(error, plan.kv[0].header.path) from error
        note_use(plan)
        container = KVCacheContainer(caches, plan.tokens, logits, model=model)
        container.reason = match.reason
        return container


def _match_without(
    match: Match, error: DamagedFile | FileNotFoundError, avoid: dict[Path, str]
) -> Match:
    """The match once more, now that a file of it is gone or has proved bad.

    A bad file that this process may not put aside is added to `avoid`.
    """
    assert match.store is not None
    assert match.space is not None
    if isinstance(error, DamagedFile) and not match.store.quarantine(error):
        avoid[Path(error.path)] = error.reason
    folder = match.store.space_folder(match.space)
    with store_errors(folder):
        again = match_in_space(match.store, match.space, folder, match.ids, avoid)
    shorter = again.tokens < match.tokens or (match.exact and not again.exact)
    if isinstance(error, DamagedFile) and shorter:
        again = replace(again, reason=ended_by_damage(error, again.resume_tokens))
    return again


def _restore(
    plan: RestorePlan, space: Space | None, model: Any, threads: int, live: bool
) -> list[Any]:
    limit = space.max_kv_size if space else None
    caches: list[Any] = make_prompt_cache(model, max_kv_size=limit)
    if plan.tokens == 0 or space is None:
        return caches
    _check_leaves(space.leaves, leaf_caches(caches))
    groups = groups_of(space.leaves)
    for record, parts in (("kv", plan.kv), ("window", plan.window)):
        chosen = [group for group in groups if group.record == record]
        landings = [
            _landing(number, group, plan.tokens, parts, space, live and (model, caches))
            for number, group in enumerate(chosen)
        ]
        if landings:
            fill(landings, parts, threads)
        for landing in landings:
            landing.hand_over(caches, space.leaves, plan.tokens)
    if plan.logits is not None:  # the last token was fed alone, to have its logits
        for cache in leaf_caches(caches):
            adapter = adapter_of(cache)
            if adapter is not None and cache.keys is not None:
                adapter.turn(cache)
    if plan.state is not None:
        _fill_states(plan.state, leaf_caches(caches))
    mx.eval([cache.state for cache in caches])
    return caches


def _landing(
    number: int,
    group: Group,
    tokens: int,
    parts: Sequence[Part],
    space: Space,
    live: Literal[False] | tuple[Any, list[Any]],
) -> Landing:
    """Where the rows of a group go; `live` is the model and its caches if codes may stay codes."""
    if live:
        described = parts[0].header.meta.groups[number]
        keys, values = (LayerCoding.from_json(described[side]["coding"]) for side in ("k", "v"))
        if not mismatch(keys, values):
            model, caches = live
            unfit = unfit_layers(model, caches, bits=keys.bits, group_size=keys.group_size)
            if not any(space.leaves[index].path in unfit for index in group.leaves):
                return LiveLanding(group, tokens, keys)
    return Landing(group, tokens)


def _fill_states(header: Header, leaves: Sequence[Any]) -> None:
    data = read_data(header)
    for described in header.meta.groups:
        slots: list[mx.array | None] = [None] * described["slots"]
        for slot in described["present"]:
            info = header.tensors[f"{described['leaf']}.{slot}"]
            dtype = from_safetensors(info.dtype)
            slots[slot] = to_array(data[info.start : info.end], dtype, info.shape)
        leaves[described["leaf"]].cache = slots


def _logits(header: Header | None) -> mx.array | None:
    if header is None:
        return None
    info = header.tensors["logits"]
    return to_array(read_data(header), from_safetensors(info.dtype), info.shape)


def _check_leaves(stored: Sequence[Leaf], leaves: Sequence[Any]) -> None:
    ours = [type(leaf).__name__ for leaf in leaves]
    theirs = [leaf.cache_class for leaf in stored]
    if ours != theirs:
        raise UnsupportedModel(
            f"this model's {len(ours)} caches ({', '.join(sorted(set(ours)))}) are not the "
            f"{len(theirs)} ({', '.join(sorted(set(theirs)))}) that the store was written with: "
            "another version of mlx-lm may have changed the model; prefill the prompt again"
        )
