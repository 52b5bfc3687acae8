"""Where on a walk every layer can be restored, and from which files.

Full-attention layers can be cut anywhere. A window layer needs the records of the `window` tokens
before the cut. A recurrent layer needs a state that was kept exactly there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvq.errors import DamagedFile
from kvq.store.blockfile import Header, read_header
from kvq.store.children import Candidate, Children
from kvq.store.keys import BLOCK
from kvq.store.layout import block_path
from kvq.store.space import Needs
from kvq.store.walk import Step, Walk


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file to read and which of its block's tokens: [low, high), counted within the block."""

    header: Header
    low: int
    high: int

    @property
    def start(self) -> int:
        """Position (tokens) in the prompt of the first row to read."""
        return self.header.meta.start + self.low


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """The files that restore a cache of exactly `tokens` tokens."""

    tokens: int
    kv: tuple[Part, ...] = ()
    window: tuple[Part, ...] = ()
    state: Header | None = None
    logits: Header | None = None

    def files(self) -> Iterator[Header]:
        yield from (part.header for part in (*self.kv, *self.window))
        yield from (header for header in (self.state, self.logits) if header is not None)


class Restorable:
    """Answers where a walk can be cut. Remembers what it listed and opened."""

    def __init__(self, walk: Walk, needs: Needs) -> None:
        self.walk = walk
        self.needs = needs
        #: Files whose header did not hold, besides those of the walk.
        self.damaged: list[DamagedFile] = []
        self._children: dict[int, Children] = {}
        self._steps: dict[bytes, Step | None] = {step.block.key: step for step in walk.chain}
        self._steps |= {step.block.key: step for step in walk.tails}
        self._headers: dict[tuple[bytes, str, bool], Header | None] = {}

    def deepest(self, limit: int | None = None) -> RestorePlan:
        """The plan for the deepest position at or before `limit` (tokens); 0 tokens at worst."""
        extent = self.walk.extent if limit is None else min(limit, self.walk.extent)
        if not self.needs.state and not self.needs.window:
            return self._plan(extent, self._step_to(extent)) if extent else RestorePlan(tokens=0)
        for number in range(min(len(self.walk.chain), extent // BLOCK), -1, -1):
            plan = self._inside(number, extent)
            if plan is None and number:
                plan = self._deepest_within(self.walk.chain[number - 1], extent)
            if plan is not None:
                return plan
        return RestorePlan(tokens=0)

    def at(self, tokens: int) -> RestorePlan | None:
        """The plan for exactly `tokens`, or None when that position cannot be restored."""
        if tokens == 0:
            return RestorePlan(tokens=0)
        plan = self.deepest(tokens)
        return plan if plan.tokens == tokens else None

    def _inside(self, number: int, extent: int) -> RestorePlan | None:
        """The deepest plan after the first `number` blocks of the chain and up to `extent`.

        Another prompt may have kept a state or window records inside a block of this chain, so
        all siblings count, wherever the chain itself goes on.
        """
        start = number * BLOCK
        if start == extent:
            return None
        if number not in self._children:
            self._children[number] = self.walk.children_of(number)
        best: RestorePlan | None = None
        for candidate in self._children[number].candidates:
            if best is not None and start + min(candidate.bound, extent - start) <= best.tokens:
                break
            if self.needs.window and not candidate.has_window:
                continue
            if self.needs.state and not (candidate.whole and start + candidate.block.n <= extent):
                continue
            step = self._step(candidate, start)
            plan = self._deepest_within(step, extent) if step is not None else None
            if plan is not None and (best is None or plan.tokens > best.tokens):
                best = plan
        return best

    def _step(self, candidate: Candidate, start: int) -> Step | None:
        key = candidate.block.key
        if key not in self._steps:
            try:
                self._steps[key] = self.walk.open(candidate, start)
            except DamagedFile as error:
                self._steps[key] = None
                if error.path not in {one.path for one in self.walk.damaged}:
                    self.damaged.append(error)
        return self._steps[key]

    def _step_to(self, tokens: int) -> Step:
        """The deepest-sharing step that holds the token right before `tokens`."""
        if self.walk.tails and tokens > self.walk.tails[0].start:
            return self.walk.tails[0]
        return self.walk.chain[(tokens - 1) // BLOCK]

    def _deepest_within(self, step: Step, extent: int) -> RestorePlan | None:
        end = min(step.end, extent)
        if self.needs.state:
            kept_here = step.whole and end == step.end and self._header(step, "state") is not None
            if not kept_here:
                return None
        # A cut less deep inside this block would need rows further back: no use trying those.
        return self._plan(end, step) if self._window_parts(end, step) is not None else None

    def _plan(self, tokens: int, step: Step) -> RestorePlan:
        path = self._path(step)
        window = self._window_parts(tokens, step)
        assert window is not None
        at_end = step.whole and tokens == step.end
        return RestorePlan(
            tokens=tokens,
            kv=tuple(
                Part(header=one.header, low=0, high=min(one.block.n, tokens - one.start))
                for one in path
            ),
            window=tuple(window),
            state=self._header(step, "state") if at_end and self.needs.state else None,
            logits=self._header(step, "logits") if at_end else None,
        )

    def _path(self, step: Step) -> tuple[Step, ...]:
        """The blocks from token 0 on, up to and with `step`."""
        return (*self.walk.chain[: step.start // BLOCK], step)

    def _window_parts(self, tokens: int, step: Step) -> list[Part] | None:
        """The window files for a cut at `tokens` inside `step`; None when rows are missing."""
        if not self.needs.window:
            return []
        low = max(0, tokens - self.needs.window)
        ranges = [(low, tokens)]
        if self.needs.keep and low > 0:
            ranges.insert(0, (0, min(self.needs.keep, low)))
        parts: list[Part] = []
        for first, last in ranges:
            for one in self._path(step):
                a, b = max(first, one.start) - one.start, min(last, one.end) - one.start
                if a >= b:
                    continue
                header = self._header(one, "window", low=a)
                if header is None:
                    return None
                parts.append(Part(header=header, low=a, high=b))
        return parts

    def _header(self, step: Step, record: str, low: int = 0) -> Header | None:
        """Header of another record of the step's block, kept or checkpoint; None when absent.

        A window record must hold the rows from token `low` of the block on.
        """
        for checkpoint in (False, True):
            key = (step.block.key, record, checkpoint)
            if key not in self._headers:
                self._headers[key] = self._open(step, record, checkpoint)
            header = self._headers[key]
            if header is not None and (record != "window" or header.meta.low <= low):
                return header
        return None

    def _open(self, step: Step, record: str, checkpoint: bool) -> Header | None:
        path = block_path(self.walk.space, step.block, record, ckpt=checkpoint)
        try:
            if path in self.walk.avoid:
                raise DamagedFile(str(path), self.walk.avoid[path])
            header = read_header(path)
            meta, kv = header.meta, step.header.meta
            if (meta.record, meta.space, meta.start, meta.key) != (
                record,
                kv.space,
                kv.start,
                step.block.key,
            ):
                raise DamagedFile(str(path), "the header does not belong to the file's name")
        except FileNotFoundError:
            return None
        except DamagedFile as error:
            self.damaged.append(error)
            return None
        return header
