"""What a batch consists of, kept in Redis in pieces of a few hundred."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvq.queue import keys

#: Entries in one piece.
PIECE = 500


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One prompt, or one prefix that prompts share (no `custom_id`).

    `job_id` is None for a prompt that the store had already; `facts` are those of its cache.
    `work` counts the tokens that its job was planned to prefill; 0 for all but the first of
    several prompts that one job answers.
    """

    custom_id: str | None
    job_id: str | None
    name: str | None
    tokens: int
    work: int
    facts: dict[str, Any] | None = None

    def encode(self) -> list[Any]:
        row = [self.custom_id, self.job_id, self.name, self.tokens, self.work]
        return row if self.facts is None else [*row, self.facts]

    @classmethod
    def decode(cls, row: Sequence[Any]) -> Entry:
        return cls(
            custom_id=row[0],
            job_id=row[1],
            name=row[2],
            tokens=row[3],
            work=row[4],
            facts=row[5] if len(row) > 5 else None,
        )


def write(pipe: Any, batch: str, entries: Sequence[Entry], *, kind: str, lifetime: int) -> None:
    """Queue the writing of all `entries` in `pipe`. `kind` is `prompts` or `prefixes`.

    Writing the same entries again changes nothing.
    """
    for number, start in enumerate(range(0, len(entries), PIECE)):
        rows = [one.encode() for one in entries[start : start + PIECE]]
        data = json.dumps(rows, separators=(",", ":"), ensure_ascii=False)
        pipe.hset(keys.entries(batch), f"{kind}:{number}", data)
    pipe.expire(keys.entries(batch), lifetime)


def read(connection: Any, batch: str, *, kind: str) -> Iterator[list[Entry]]:
    """The pieces of a batch, in order."""
    number = 0
    while data := connection.hget(keys.entries(batch), f"{kind}:{number}"):
        yield [Entry.decode(row) for row in json.loads(data)]
        number += 1
