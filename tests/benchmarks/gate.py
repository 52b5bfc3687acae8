"""`gate`: what measuring a codec's quality adds to the prefill of a real prompt."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

import kvq
from benchmarks.measure import machine
from benchmarks.texts import ROOT
from kvq.prefill import Prefiller, PrefillOutcome, PrefillRequest
from kvq.store import Store
from kvq.store.keys import TokenIds

PROMPTS = ROOT / "producer" / "examples" / "prompts.jsonl"


@dataclass(kw_only=True)
class Jobs:
    """Seconds of whole jobs that store `codec`, run in turn without the gate and with it."""

    codec: str
    without: list[float] = field(default_factory=list)
    gated: list[float] = field(default_factory=list)

    @property
    def added(self) -> float:
        """The median of what a job took more than the one before it, which had no gate."""
        return statistics.median(b - a for a, b in zip(self.without, self.gated, strict=True))


def run(model: str, tokens: int, *, codecs: Sequence[str], runs: int, folder: str | None) -> None:
    """Print the table for the first `tokens` tokens of the example prompts."""
    llm = kvq.open(model)
    lines = PROMPTS.read_text().splitlines()
    ids = llm.encode("\n\n".join(json.loads(line)["prompt"] for line in lines))[:tokens]
    if len(ids) < tokens:
        raise SystemExit(f"the example prompts have {len(ids)} tokens only: lower --tokens")
    jobs = {}
    for codec in codecs:
        with tempfile.TemporaryDirectory(dir=folder) as temp:
            prefiller = Prefiller(Store.create(Path(temp) / "store"), llm.loaded)
        # The first is a warm-up, and after it `auto` starts with the codec that passed.
        jobs[codec] = Jobs(codec=_job(prefiller, ids, codec, folder)[1].codec)
        for _ in range(runs):
            with patch("kvq.prefill.prefiller.candidates", lambda *_: ()):
                jobs[codec].without.append(_job(prefiller, ids, jobs[codec].codec, folder)[0])
            jobs[codec].gated.append(_job(prefiller, ids, codec, folder)[0])
    Console(width=100).print(_table(jobs, len(ids)))


def _job(
    prefiller: Prefiller, ids: TokenIds, codec: str, folder: str | None
) -> tuple[float, PrefillOutcome]:
    """Seconds of one whole job in an empty store, and its outcome."""
    with tempfile.TemporaryDirectory(dir=folder) as temp:
        prefiller.store = Store.create(Path(temp) / "store")
        request = PrefillRequest(token_ids=ids, name="benchmark", codec=codec)
        began = time.perf_counter()
        outcome = prefiller.run(request)
        return time.perf_counter() - began, outcome


def _table(jobs: dict[str, Jobs], tokens: int) -> Table:
    title = f"jobs of {tokens} tokens, without the gate and with it\n{machine()}"
    table = Table(title=title, title_justify="left", title_style="")
    for column in ("codec", "without s", "min - max", "with s", "min - max", "gate s", "share"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for codec, one in jobs.items():
        base = statistics.median(one.without)
        table.add_row(
            codec if codec == one.codec else f"{codec} ({one.codec})",
            *_spread(one.without),
            *_spread(one.gated),
            f"{one.added:.2f}",
            f"{one.added / base:.1%}",
        )
    return table


def _spread(seconds: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f} - {max(seconds):.2f}"
