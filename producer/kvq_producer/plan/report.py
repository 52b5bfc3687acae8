"""A plan as a table for people and as facts for programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from kvq import codec as codecs
from kvq.units import format_bytes, format_seconds
from kvq_producer.plan.estimate import (
    DISK_RATE,
    USUAL,
    DiskUse,
    Estimate,
    Keeping,
    disk_use,
    estimate,
)
from kvq_producer.plan.planner import Plan
from kvq_producer.plan.values import Group, Totals
from kvq_producer.sizes import CacheShape, known_codec


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known of a plan.

    `shapes` are the caches of the groups whose model's config tells; `rate` (tokens a second) and
    `disk_rate` (bytes a second) give the times.
    """

    plan: Plan
    shapes: dict[Group, CacheShape]
    rate: float | None = None
    #: Where the rate was not given but measured.
    measured: bool = False
    disk_rate: float = DISK_RATE
    keeping: Keeping = USUAL

    def disk(self, codec: str | None = None) -> DiskUse | None:
        """Bytes that the jobs add with `codec`, or each group's own; None if any is unknown."""
        if any(one.group not in self.shapes for one in self.plan.groups):
            return None
        uses = (self._group_disk(one.group, codec or one.group.codec) for one in self.plan.groups)
        return sum(uses, DiskUse())

    def _group_disk(self, group: Group, codec: str) -> DiskUse:
        return disk_use(self.plan, group, self.shapes[group], codec, self.keeping)

    def times(self) -> Estimate | None:
        """None without a rate."""
        if self.rate is None:
            return None
        return estimate(self.plan, self.shapes, self.rate, disk_rate=self.disk_rate)

    def as_json(self) -> dict[str, Any]:
        """Counts of tokens, bytes, seconds; null where not known."""
        times = self.times()
        return {
            **_counts(self.plan.totals),
            "groups": [
                {
                    "model": one.group.model,
                    "adapter": one.group.adapter,
                    "codec": one.group.codec,
                    **_counts(one.totals),
                    "cache": _cache_json(self.shapes.get(one.group)),
                }
                for one in self.plan.groups
            ],
            "bytes": {name: _bytes_json(self.disk(name)) for name in codecs.names()},
            "rate": self.rate,
            "disk_rate": self.disk_rate,
            "seconds": None if times is None else _finite(asdict(times)),
        }

    def render(self) -> RenderableType:
        """The table."""
        totals = self.plan.totals
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(justify="right")
        table.add_column(style="dim")
        prompts = [f"{totals.duplicates:,} equal to another"] if totals.duplicates else []
        if totals.already_stored:
            prompts.append(f"{totals.already_stored:,} stored already")
        table.add_row("prompts", f"{totals.prompts:,}", ", ".join(prompts))
        table.add_row("tokens", f"{totals.tokens:,}", "one prefill for each prompt")
        table.add_row("unique tokens", f"{totals.unique_tokens:,}", "every shared prefix once")
        table.add_row(
            "to prefill",
            _range(f"{totals.new_tokens:,}", f"{totals.prefill_tokens:,}"),
            "" if totals.new_tokens == totals.prefill_tokens else _SPAN,
        )
        saving = _range(f"{totals.saving:.1%}", f"{totals.best_saving:.1%}")
        table.add_row("saving", saving, "of the tokens")
        kinds = f"{totals.prefix_jobs:,} shared prefixes, {totals.prompt_jobs:,} prompts"
        table.add_row("jobs", f"{totals.jobs:,}", kinds)
        self._add_bytes(table)
        self._add_times(table)
        if len(self.plan.groups) < 2:
            return table
        return Lines(table, "", self._groups())

    def _add_bytes(self, table: Table) -> None:
        chosen = {known_codec(one.group.codec) for one in self.plan.groups}
        for name in codecs.names():
            use = self.disk(name)
            if use is None:
                table.add_row("bytes to write", "unknown", "see the model's config.json")
                return
            parts = {"windows": use.window, "states": use.state, "logits": use.logits}
            notes = [f"{format_bytes(n)} {part}" for part, n in parts.items() if n]
            if chosen == {name}:
                notes.append("chosen")
            table.add_row(f"bytes as {name}", format_bytes(use.total), ", ".join(notes))

    def _add_times(self, table: Table) -> None:
        times = self.times()
        if times is None:
            return
        prefill = _range(format_seconds(times.least_seconds), format_seconds(times.most_seconds))
        source = ", as measured" if self.measured else ""
        table.add_row("prefill", prefill, f"of one worker at {self.rate:,.0f} tokens/s{source}")
        table.add_row("without sharing", format_seconds(times.unshared_seconds), "")
        if times.load_seconds is None or times.break_even_resumes is None:
            return
        at = f"at {format_bytes(self.disk_rate)}/s"
        table.add_row("load all once", format_seconds(times.load_seconds), at)
        table.add_row("pays after", *_pays_after(times.break_even_resumes))
        if times.break_even_disk_rate is not None:
            least = f"{format_bytes(times.break_even_disk_rate)}/s"
            table.add_row("slowest disk", least, "below it, prefilling again is quicker")

    def _groups(self) -> Table:
        table = Table("model", "codec", box=None, pad_edge=False, header_style="bold")
        for name in ("prompts", "tokens", "to prefill", "jobs", "bytes"):
            table.add_column(name, justify="right")
        for one in self.plan.groups:
            group, totals = one.group, one.totals
            use = self._group_disk(group, group.codec) if group in self.shapes else None
            table.add_row(
                group.model if group.adapter is None else f"{group.model} + {group.adapter}",
                group.codec,
                f"{totals.prompts:,}",
                f"{totals.tokens:,}",
                f"{totals.prefill_tokens:,}",
                f"{totals.jobs:,}",
                format_bytes(use.total) if use else "unknown",
            )
        return table


_SPAN = "one by one – side by side"


def sizes_table(shape: CacheShape, lengths: tuple[int, ...]) -> Table:
    """Bytes that a token adds, what comes besides, and caches of `lengths` tokens, by codec."""
    table = Table("codec", box=None, pad_edge=False, header_style="bold")
    for name in ("a token", "besides", *(f"{n:,} tokens" for n in lengths)):
        table.add_column(name, justify="right", no_wrap=True)
    for codec in codecs.names():
        constant = shape.constant_bytes(codec)
        table.add_row(
            codec,
            f"{shape.kv_bytes(codec):,.0f} B",
            format_bytes(constant) if constant else "",
            *(format_bytes(shape.cache_bytes(codec, n)) for n in lengths),
        )
    return table


def sizes_json(shape: CacheShape, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The same, in bytes."""
    return {
        name: {
            "bytes_per_token": shape.kv_bytes(name),
            "constant_bytes": shape.constant_bytes(name),
            "window_tokens": shape.window_tokens,
            "state_bytes": shape.state_bytes,
            "caches": {str(n): round(shape.cache_bytes(name, n)) for n in lengths},
        }
        for name in codecs.names()
    }


def _counts(totals: Totals) -> dict[str, Any]:
    facts = asdict(totals)
    return {**facts, "jobs": totals.jobs, "saving": totals.saving,
            "best_saving": totals.best_saving}  # fmt: skip


def _cache_json(shape: CacheShape | None) -> dict[str, Any] | None:
    if shape is None:
        return None
    return {
        "bytes_per_token": {name: shape.kv_bytes(name) for name in codecs.names()},
        "constant_bytes": {name: shape.constant_bytes(name) for name in codecs.names()},
    }


def _bytes_json(use: DiskUse | None) -> dict[str, int] | None:
    if use is None:
        return None
    return {"total": round(use.total), **{name: round(n) for name, n in asdict(use).items()}}


def _finite(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity."""
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in facts.items()}


def _pays_after(resumes: float) -> tuple[str, str]:
    if math.isinf(resumes):
        return "never", "reading is not faster than prefilling"
    count = max(1, math.ceil(resumes))
    return f"{count:,} {'use' if count == 1 else 'uses'}", "of each prompt"


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} – {most}"
