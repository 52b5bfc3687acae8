"""The caches of a store as rows: which to show, and in what order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from kvq.store.footprint import Footprint
from kvq.store.manifest import Manifest

#: Fewer leading digits of a fingerprint would not tell models apart.
_DIGITS = 6


class Order(StrEnum):
    """What a list is sorted by: names from A on, else the newest or the largest first."""

    NAME = "name"
    CREATED = "created"
    USED = "used"
    SIZE = "size"


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which caches to show: those that fulfil all that is given.

    `model` is the model's name as it was submitted, the last part of it, a pattern of either, or
    the first digits of the fingerprint (at least 6).
    """

    model: str | None = None
    codec: str | None = None
    name: str | None = None
    expired: bool = False
    pinned: bool = False

    def takes(self, manifest: Manifest, now: float) -> bool:
        """Whether to show the cache at the time `now` (seconds since 1970)."""
        return (
            (self.model is None or _is_model(manifest, self.model))
            and self.codec in (None, manifest.codec)
            and (self.name is None or fnmatchcase(manifest.name, self.name))
            and (not self.expired or is_expired(manifest, now))
            and (not self.pinned or manifest.pinned)
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cache and what it takes."""

    manifest: Manifest
    footprint: Footprint


def arrange(rows: Iterable[Row], order: Order, *, reverse: bool = False) -> list[Row]:
    """The rows in order; equal ones by name."""

    def key(row: Row) -> tuple[float, str]:
        return -_figure(row, order), row.manifest.name

    return sorted(rows, key=key, reverse=reverse)


def is_expired(manifest: Manifest, now: float) -> bool:
    """Whether the cache's lifetime has ended. A pinned one is kept all the same."""
    return manifest.expires is not None and manifest.expires <= now


def _figure(row: Row, order: Order) -> float:
    match order:
        case Order.NAME:
            return 0.0
        case Order.CREATED:
            return row.manifest.created
        case Order.USED:
            return row.footprint.used
        case Order.SIZE:
            return row.footprint.nbytes


def _is_model(manifest: Manifest, wanted: str) -> bool:
    name = manifest.model.rstrip("/")
    if any(fnmatchcase(one, wanted.rstrip("/")) for one in (name, name.rpartition("/")[2])):
        return True
    return len(wanted) >= _DIGITS and manifest.fingerprint.startswith(wanted.lower())
