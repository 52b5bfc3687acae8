"""`ttft`: time to the first token, cold and resumed, over prompt lengths.

A resumed prompt cannot be quicker than its files are read and the rest of it goes through the
model once. Each is measured in a new process, in which nothing is warm but the model.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import kvq
from benchmarks.measure import machine
from benchmarks.picture import new_axes, save
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store
from kvq.store.keys import TokenIds, as_ids

#: Tokens after the stored ones, as of a question after a document.
SUFFIX = 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """Median seconds at `tokens` stored tokens; `cold` is None where it would take too long.

    `resumed` is the first prompt of a process, of which `load` is spent on matching and restoring;
    `later` is one after it. `read` is a bare read of the `nbytes` of files, `forward` one forward
    of the suffix: at first, as `resumed`, and later.
    """

    tokens: int
    cold: float | None
    resumed: float
    load: float
    later: float
    read: float
    forward: float
    later_read: float
    later_forward: float
    nbytes: float

    @property
    def least(self) -> float:
        return self.read + self.forward

    @property
    def later_least(self) -> float:
        return self.later_read + self.later_forward


def run(
    model: str,
    lengths: Sequence[int],
    *,
    codec: str,
    runs: int,
    text: Path,
    cold_seconds: float,
    plot: Path | None,
) -> None:
    """Print the table for a model folder and the words of `text`, and draw it.

    A cold prompt is repeated only as long as that takes no more than `cold_seconds`, and left out
    where once would take longer.
    """
    with tempfile.TemporaryDirectory() as temp:
        store = Store.create(Path(temp) / "store")
        llm = kvq.open(model)
        ids = llm.encode(text.read_text())
        while len(ids) < max(lengths) + SUFFIX:
            ids = as_ids([*ids, *ids])
        prefiller = Prefiller(store, llm.loaded)
        rows = []
        for length in sorted(lengths):
            # Longer prompts are not stored yet, so this one's match ends where it should.
            prefiller.run(PrefillRequest(token_ids=ids[:length], name=f"n{length}", codec=codec))
            prompt = ids[: length + SUFFIX]
            resumed = _medians([_fresh("resume", model, store, codec, prompt) for _ in range(runs)])
            assert resumed.pop("reused") == length
            least = _medians([_fresh("least", model, store, codec, prompt) for _ in range(runs)])
            cold = _cold(llm, prompt, runs, cold_seconds, rows[-1] if rows else None)
            rows.append(Row(tokens=length, cold=cold, **resumed, **least))
    _show(rows, codec)
    if plot is not None:
        draw(rows, codec, plot)


def _fresh(way: str, model: str, store: Store, codec: str, prompt: TokenIds) -> dict[str, float]:
    """What `ttft_fresh` prints in a new process."""
    command = [sys.executable, "-m", "benchmarks.ttft_fresh", model, str(store.path), codec, way]
    done = subprocess.run(
        command, input=json.dumps(prompt.tolist()), capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in runs) for name in runs[0]}


def _cold(
    llm: kvq.LLM, prompt: TokenIds, runs: int, limit: float, before: Row | None
) -> float | None:
    if before is not None:
        grown = len(prompt) / (before.tokens + SUFFIX)
        if before.cold is None or before.cold * grown > limit:
            return None
    seconds: list[float] = []
    while len(seconds) < runs and (not seconds or sum(seconds) + seconds[-1] < limit):
        for _ in llm.stream(prompt, max_tokens=1, reuse=False):
            pass
        assert llm.last is not None
        seconds.append(llm.last.ttft_seconds)
    return statistics.median(seconds)


def _show(rows: Sequence[Row], codec: str) -> None:
    title = f"time to the first token, {codec}, {SUFFIX} tokens after the stored ones\n{machine()}"
    table = Table(title=title, title_justify="left", title_style="")
    for column in (
        *("tokens", "MB", "cold s", "resumed s", "x sooner", "of it restoring"),
        *("bare read s", "one forward s", "resumed / both", "later s", "later / both"),
    ):
        table.add_column(column, justify="right")
    for one in rows:
        table.add_row(
            f"{one.tokens:,}",
            f"{one.nbytes / 1e6:.1f}",
            "-" if one.cold is None else f"{one.cold:.2f}",
            f"{one.resumed:.3f}",
            "-" if one.cold is None else f"{one.cold / one.resumed:.1f}",
            f"{one.load:.3f}",
            f"{one.read:.3f}",
            f"{one.forward:.3f}",
            f"{one.resumed / one.least:.2f}",
            f"{one.later:.3f}",
            f"{one.later / one.later_least:.2f}",
        )
    Console(width=140).print(table)


def draw(rows: Sequence[Row], codec: str, path: Path) -> None:
    """Cold, resumed, and the least that a resumed prompt can take, by tokens."""
    figure, (field,) = new_axes(1)
    cold = [(one.tokens, one.cold) for one in rows if one.cold is not None]
    tokens = [one.tokens for one in rows]
    field.plot(*zip(*cold, strict=True), "o-", color="#8a8a8a", label="cold")
    resumed = [one.resumed for one in rows]
    field.plot(tokens, resumed, "o-", color="#1b6ca8", label=f"resumed, {codec}, new process")
    least = [one.least for one in rows]
    field.plot(tokens, least, "--", color="#c8553d", label="bare read and one forward")
    field.set_xlabel("tokens before the last 16")
    field.set_ylabel("seconds to the first token")
    field.legend(fontsize=8)
    save(figure, path)
