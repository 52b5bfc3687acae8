"""How far a batch has come; what is over is not asked for again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvq.queue import keys, scripts
from kvq.queue.batch import Batch
from kvq.queue.enqueue import run_script
from kvq.queue.entries import PIECE
from kvq.queue.results import State

#: Letters of the script STATUS that do not change any more.
_OVER = {"s": State.STORED, "f": State.FAILED, "d": State.FAILED, "c": State.CANCELED,
         "l": State.LOST}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counts of prompts by state, and of tokens. `running` counts jobs, prefixes included."""

    states: Counter[State] = field(default_factory=Counter)
    prompts: int = 0
    running: int = 0
    done_tokens: int = 0
    work_tokens: int = 0

    @property
    def over(self) -> bool:
        """Whether no prompt is left to wait for."""
        return not self.states[State.PENDING]

    @property
    def finished(self) -> int:
        """Prompts that will not change any more."""
        return self.prompts - self.states[State.PENDING]


class Watch:
    """Watches one batch. `poll` may raise redis errors; it can simply be called again."""

    def __init__(self, connection: Any, batch: Batch) -> None:
        self._status = run_script(connection, scripts.STATUS)
        self._batch = batch
        self._prompts_of: Counter[str] = Counter()
        self._work: Counter[str] = Counter()
        self._final: Counter[State] = Counter()
        self._done = 0
        for piece in (*batch.prefixes(), *batch.prompts()):
            for one in piece:
                if one.job_id is None:
                    self._final[State.STORED] += 1
                    continue
                self._work[one.job_id] += one.work
                self._prompts_of[one.job_id] += one.custom_id is not None
        self._total = sum(self._work.values())
        self._pending = list(self._prompts_of)

    def poll(self) -> Progress:
        """How the batch stands now."""
        running = partly = 0
        pending: list[str] = []
        missing: State | None = None
        for start in range(0, len(self._pending), PIECE):
            ids = self._pending[start : start + PIECE]
            letters, *details = self._status(args=[keys.JOB_PREFIX, *ids])
            for job_id, letter in zip(ids, letters.decode(), strict=True):
                state = _OVER.get(letter, State.PENDING)
                if state is State.LOST:
                    state = missing = missing or self._batch.state_of_missing_jobs()
                if state is State.PENDING:
                    pending.append(job_id)
                    continue
                self._final[state] += self._prompts_of[job_id]
                self._done += self._work[job_id]
            for at in range(0, len(details), 3):
                running += 1
                work = self._work[ids[details[at]]]
                left = int(details[at + 2]) - int(details[at + 1])
                partly += max(0, work - max(0, left)) if details[at + 2] != b"0" else 0
        self._pending = pending
        states = self._final.copy()
        states[State.PENDING] += sum(self._prompts_of[job_id] for job_id in pending)
        return Progress(
            states=states,
            prompts=sum(states.values()),
            running=running,
            done_tokens=self._done + partly,
            work_tokens=self._total,
        )
