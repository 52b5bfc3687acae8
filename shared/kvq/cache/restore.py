"""Restoring: from the files of a match to the model's caches.

Threads read the files, check their digests, and copy raw rows into place; quantized ones are
decoded on the device, block by block, so that little is in memory twice. Nothing is returned
unevaluated, and nothing of a file whose digest does not hold is ever used.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from kvq import codec as codecs
from kvq.cache.adapters import adapter_of
from kvq.cache.container import KVCacheContainer
from kvq.cache.dtypes import from_safetensors, to_array
from kvq.cache.groups import Group, groups_of, tensor_name
from kvq.cache.landing import Landing
from kvq.cache.leaves import leaf_caches
from kvq.codec import LayerCoding
from kvq.errors import DamagedFile, UnsupportedModel
from kvq.store.blockfile import Header, read_data, read_into
from kvq.store.disk import store_errors, unavailable
from kvq.store.match import Match, ended_by_damage, match_in_space
from kvq.store.restorable import Part, RestorePlan
from kvq.store.space import Leaf, Space
from kvq.store.use import note_use

Bytes = npt.NDArray[np.uint8]

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def restore(
    match: Match, model: Any, *, upto: int | None = None, threads: int | None = None
) -> KVCacheContainer:
    """The model's caches at `upto` tokens of the match; see `Match.load`.

    `threads` read in parallel (default: the machine's cores, at most 16).
    """
    plan = match.plan_at(upto)
    avoid: dict[Path, str] = {}
    while True:
        try:
            caches = _restore(plan, match.space, model, threads or min(16, os.cpu_count() or 1))
            logits = _logits(plan.logits)
        except (DamagedFile, FileNotFoundError) as error:
            # A file is bad, or a sweep took it meanwhile: what is before it still stands.
            match = _match_without(match, error, avoid)
            plan = match.plan if upto is None else match.plan_upto(min(upto, match.resume_tokens))
            continue
        except OSError as error:
            raise unavailable(error, plan.kv[0].header.path) from error
        note_use(plan)
        container = KVCacheContainer(caches, tokens=plan.tokens, logits=logits)
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
    if isinstance(error, DamagedFile) and again.tokens < match.tokens:
        again = replace(again, reason=ended_by_damage(error, again.tokens))
    return again


def _restore(plan: RestorePlan, space: Space | None, model: Any, threads: int) -> Sequence[Any]:
    limit = space.max_kv_size if space else None
    caches: Sequence[Any] = make_prompt_cache(model, max_kv_size=limit)
    if plan.tokens == 0 or space is None:
        return caches
    leaves = leaf_caches(caches)
    _check_leaves(space.leaves, leaves)
    groups = groups_of(space.leaves)
    for record, parts in (("kv", plan.kv), ("window", plan.window)):
        landings = [Landing(group, plan.tokens) for group in groups if group.record == record]
        if landings:
            _fill(landings, parts, threads)
        for landing in landings:
            for index, rows in landing.leaf_rows():
                adapter = adapter_of(leaves[index])
                assert adapter is not None
                adapter.fill(leaves[index], rows, plan.tokens)
                if plan.logits is not None:  # the last token was fed alone, to have its logits
                    adapter.turn(leaves[index])
    if plan.state is not None:
        _fill_states(plan.state, leaves)
    mx.eval([cache.state for cache in leaves])
    return caches


def _fill(landings: list[Landing], parts: Sequence[Part], threads: int) -> None:
    """Read every part and put its rows into the landings."""
    lossy = _is_lossy(parts[0].header)
    if not lossy:
        for landing in landings:
            landing.open_views()
    groups = [landing.group for landing in landings]

    def read(part: Part) -> Bytes | None:
        _check_groups(part.header, groups)
        if lossy:
            return read_data(part.header)
        _read_raw(landings, part)
        return None

    with ThreadPoolExecutor(threads, thread_name_prefix="kvq-read") as pool:
        for part, data in _in_order(pool, read, parts, ahead=2 * threads):
            if data is not None:
                _put_decoded(landings, part, data)
                mx.eval([landing.arrays() for landing in landings])


def _in_order(
    pool: ThreadPoolExecutor, read: Any, parts: Sequence[Part], ahead: int
) -> Iterator[tuple[Part, Bytes | None]]:
    """Results in the order of the parts, with at most `ahead` of them under way."""
    waiting: deque[tuple[Part, Future[Bytes | None]]] = deque()
    try:
        for part in parts:
            waiting.append((part, pool.submit(read, part)))
            if len(waiting) > ahead:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


def _read_raw(landings: list[Landing], part: Part) -> None:
    """Read a file straight to where its rows go, or through a buffer where only some are wanted."""
    header = part.header
    low, count = part.low - header.meta.low, part.high - part.low
    views: list[memoryview] = []
    copies: list[tuple[Landing, int, Bytes]] = []
    for number, landing in enumerate(landings):
        for side, (name, _) in enumerate(landing.group.sides()):
            info = header.tensors[tensor_name(number, name, "")]
            whole = low == 0 and info.shape[2] == count
            slabs = landing.slabs(side, part.start, count) if whole else None
            if slabs is None:
                buffer = np.empty(info.end - info.start, np.uint8)
                slabs = [buffer.data]
                words = buffer.view(_WORDS[from_safetensors(info.dtype).size])
                copies.append((landing, side, words.reshape(info.shape)))
            views.extend(slabs)
    read_into(header, views)
    for landing, side, rows in copies:
        landing.put_host(side, part.start, rows[:, :, low : low + count])


def _put_decoded(landings: list[Landing], part: Part, data: Bytes) -> None:
    for number, landing in enumerate(landings):
        described = part.header.meta.groups[number]
        for index, (side, one) in enumerate(landing.group.sides()):
            coding = LayerCoding.from_json(described[side]["coding"])
            low = part.low - part.header.meta.low
            kept = codecs.take(
                _parts(part.header, data, number, side), low, low + part.high - part.low
            )
            landing.put(index, part.start, codecs.decode(kept, coding, one.mlx_dtype))


def _parts(header: Header, data: Bytes, group: int, side: str) -> dict[str, mx.array]:
    """The codec's parts of one side of a group, by the part's name."""
    found = {}
    whole = tensor_name(group, side, "")
    for name, info in header.tensors.items():
        if name == whole or name.startswith(f"{whole}."):
            dtype = from_safetensors(info.dtype)
            found[name[len(whole) + 1 :]] = to_array(data[info.start : info.end], dtype, info.shape)
    return found


def _is_lossy(header: Header) -> bool:
    sides = (group[side]["coding"] for group in header.meta.groups for side in ("k", "v"))
    return any(coding["codec"] != "raw" for coding in sides)


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


def _check_groups(header: Header, groups: Sequence[Group]) -> None:
    """Raise DamagedFile unless a file's groups are those of the space."""
    expected = [(list(g.leaves), g.keys.heads, g.values.heads) for g in groups]
    found = [(g["leaves"], g["k"]["heads"], g["v"]["heads"]) for g in header.meta.groups]
    if expected != found:
        raise DamagedFile(str(header.path), "its layers are not those of its space")
