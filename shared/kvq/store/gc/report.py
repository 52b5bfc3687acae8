"""What a sweep is to do and what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

_DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to collect. Durations are seconds, sizes bytes.

    `grace`: nothing younger goes, so it must be longer than a writer takes from finding a block to
    naming it in a manifest. `settle`: how long files stay aside before they are removed; 0 will do
    on a local disk, on a network share it must be longer than clients remember directories.
    `max_bytes`: evict caches until the store's blocks take no more. `expired`: collect caches
    whose time is up.
    """

    grace: float = _DAY
    settle: float = 60.0
    max_bytes: int | None = None
    expired: bool = True


class Kind(StrEnum):
    """Why something goes."""

    EXPIRED = "expired"  #: a cache whose time is up
    QUOTA = "quota"  #: a cache that was evicted to meet the quota
    UNREACHABLE = "unreachable"  #: a block file that no manifest names
    CHECKPOINT = "checkpoint"  #: a record for a job that has long ended
    TEMPORARY = "temporary"  #: an unfinished file of a writer


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A cache that is forgotten, and why."""

    name: str
    kind: Kind
    reason: str


@dataclass(kw_only=True)
class Tally:
    """Files of one kind."""

    files: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.files += 1
        self.nbytes += nbytes


@dataclass(kw_only=True)
class Report:
    """What a sweep removed, or would remove (`dry_run`). Sizes are bytes.

    `young` are files that nothing needs and that are too young to go. `unreadable` are manifests
    by name with the reason: while there are any, blocks stay, because theirs are not known.
    `over_quota` is by how much the quota is still exceeded.
    """

    dry_run: bool
    caches: list[Removed] = field(default_factory=list)
    files: dict[Kind, Tally] = field(default_factory=dict)
    young: Tally = field(default_factory=Tally)
    #: Files that were moved aside and put back, because a writer relied on them after all.
    put_back: int = 0
    kept_caches: int = 0
    kept_bytes: int = 0
    over_quota: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def freed_bytes(self) -> int:
        return sum(tally.nbytes for tally in self.files.values())

    @property
    def complete(self) -> bool:
        """Whether all was done that the policy asks for."""
        return not self.unreadable and self.over_quota == 0

    def count(self, kind: Kind, nbytes: int) -> None:
        self.files.setdefault(kind, Tally()).add(nbytes)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "freed_bytes": self.freed_bytes, "complete": self.complete}
