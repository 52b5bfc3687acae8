"""What is wrong with the lines of a prompts file, collected until all of it is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvq.errors import InvalidPrompts

#: Faults kept with their reasons. Of more only the number is known, so memory stays bounded.
KEPT = 10_000


class Fault(NamedTuple):
    """One reason why a line, counted from 1, is no prompt."""

    line: int
    reason: str


class Faults:
    """The faults of one file: whoever finds one adds it, and the caller decides what follows."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.count = 0
        #: How many lines have a fault; one line may have several.
        self.lines = 0
        self._kept: list[Fault] = []

    def add(self, line: int, reasons: Iterable[str]) -> None:
        """Record that `line` is no prompt, for all of `reasons`; once for each line."""
        self.lines += 1
        for reason in reasons:
            self.count += 1
            if len(self._kept) < KEPT:
                self._kept.append(Fault(line, reason))

    @property
    def kept(self) -> list[Fault]:
        """The first faults, at most `KEPT`, in the order of the file."""
        return sorted(self._kept, key=lambda fault: fault.line)

    def check(self) -> None:
        """Raises InvalidPrompts with all faults when there are any."""
        if self.count:
            raise InvalidPrompts(self.source, self.kept, self.count)
