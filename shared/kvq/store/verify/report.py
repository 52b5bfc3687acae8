"""What a check of a store found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"  #: something that was stored cannot be had as it was
    WARNING = "warning"  #: nothing is lost, but somebody should look
    NOTE = "note"  #: for information


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing found. `path` is relative to the store, `advice` what to do.

    `repaired` says that the file has been put aside.
    """

    path: str
    severity: Severity
    what: str
    advice: str
    repaired: bool = False

    @classmethod
    def at(
        cls,
        store: Path,
        path: Path,
        severity: Severity,
        what: str,
        advice: str,
        *,
        repaired: bool = False,
    ) -> Finding:
        """A finding about `path`, which is below `store`."""
        return cls(
            path=str(path.relative_to(store)),
            severity=severity,
            what=what,
            advice=advice,
            repaired=repaired,
        )


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """All that was found; `nbytes` of tensors were read, of `files` block files."""

    deep: bool
    files: int
    nbytes: int
    caches: int
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all that is stored is sound."""
        return all(one.severity is not Severity.ERROR for one in self.findings)

    def count(self, severity: Severity) -> int:
        return sum(one.severity is severity for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}
