"""Which caches to evict so that a store takes no more than its quota.

Evicted first is the cache of least worth per byte: seconds to compute what only it holds, times how
recently it was used, divided by the bytes of that. Used counts 1 now, 1/2 after a day, 1/8 after a
week: 1 / (1 + days). Evicting one cache can make blocks another's alone, so worths are found anew
as it goes. Exempt are pinned caches, and those with nothing that is old enough to be removed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from kvq.store.gc.report import Kind, Removed
from kvq.store.manifest import Manifest
from kvq.units import format_bytes, format_seconds

_DAY = 86400.0
#: Seconds a token where no manifest tells how long its prefill took.
_DEFAULT_PACE = 0.001

#: A block: its space and its key.
Place = tuple[str, bytes]


@dataclass(slots=True)
class BlockSize:
    """What a block takes, and when the newest of its files was touched (seconds since 1970)."""

    nbytes: int = 0
    mtime: float = 0.0


@dataclass(slots=True)
class _Owners:
    """How many caches name a block, and the sum of their numbers: of one, its number."""

    count: int = 0
    total: int = 0


@dataclass
class _Cache:
    number: int
    name: str
    pinned: bool
    pace: float
    blocks: dict[Place, int] = field(default_factory=dict)
    #: What only this cache holds and can go.
    tokens: int = 0
    nbytes: int = 0
    used: float = 0.0

    def worth(self, now: float) -> float:
        days = max(0.0, now - self.used) / _DAY
        return self.tokens * self.pace / (1 + days) / max(1, self.nbytes)


def choose_evictions(
    manifests: Mapping[str, Manifest],
    sizes: Mapping[Place, BlockSize],
    *,
    excess: int,
    cutoff: float,
    now: float,
) -> list[Removed]:
    """The caches to evict, in order, until at least `excess` bytes are freed or none is left.

    `manifests` by name are all there are, `sizes` those of all blocks. Blocks touched at `cutoff`
    or later cannot go now. Times are seconds since 1970.
    """
    chosen: list[Removed] = []
    caches = _caches(manifests)
    owners: dict[Place, _Owners] = {}
    for cache in caches:
        for place in cache.blocks:
            known = owners.setdefault(place, _Owners())
            known.count += 1
            known.total += cache.number

    def gain(cache: _Cache, place: Place) -> None:
        """`place` has become this cache's alone."""
        size = sizes.get(place, BlockSize())
        cache.used = max(cache.used, size.mtime)
        if size.mtime < cutoff:
            cache.tokens += cache.blocks[place]
            cache.nbytes += size.nbytes

    for cache in caches:
        for place in cache.blocks:
            if owners[place].count == 1:
                gain(cache, place)
    waiting = [(cache.worth(now), cache.number) for cache in caches if cache.nbytes]
    heapq.heapify(waiting)
    gone: set[int] = set()
    while waiting and excess > 0:
        worth, number = heapq.heappop(waiting)
        cache = caches[number]
        if number in gone or worth != cache.worth(now) or cache.pinned:
            continue  # evicted, judged anew since, or exempt
        gone.add(number)
        excess -= cache.nbytes
        chosen.append(_removed(cache, now))
        for place in cache.blocks:
            known = owners[place]
            known.count -= 1
            known.total -= number
            if known.count == 1:
                heir = caches[known.total]
                gain(heir, place)
                if heir.nbytes:
                    heapq.heappush(waiting, (heir.worth(now), heir.number))
    return chosen


def _caches(manifests: Mapping[str, Manifest]) -> list[_Cache]:
    paces: dict[str, list[float]] = {}
    for manifest in manifests.values():
        if (pace := _pace(manifest)) is not None:
            paces.setdefault(manifest.fingerprint, []).append(pace)
    means = {model: fmean(known) for model, known in paces.items()}
    caches = []
    for number, (name, manifest) in enumerate(manifests.items()):
        pace = _pace(manifest)
        if pace is None:
            pace = means.get(manifest.fingerprint, _DEFAULT_PACE)
        cache = _Cache(
            number=number, name=name, pinned=manifest.pinned, pace=pace, used=manifest.created
        )
        cache.blocks = {(manifest.space, block.key): block.n for block in manifest.blocks()}
        caches.append(cache)
    return caches


def _pace(manifest: Manifest) -> float | None:
    """Seconds a token that its prefill took; None where it says nothing of it."""
    computed = manifest.tokens - manifest.reused_tokens
    if manifest.prefill_seconds <= 0 or computed <= 0:
        return None
    return manifest.prefill_seconds / computed


def _removed(cache: _Cache, now: float) -> Removed:
    seconds = format_seconds(cache.tokens * cache.pace)
    idle = format_seconds(max(0.0, now - cache.used))
    return Removed(
        name=cache.name,
        kind=Kind.QUOTA,
        reason=f"frees {format_bytes(cache.nbytes)} for {seconds} of prefill, unused for {idle}",
    )
