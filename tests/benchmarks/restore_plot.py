"""`restore-plot`: seconds of a restore against stock's by tokens, measured and drawn.

Needs matplotlib, which nothing but the pictures does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Timing, show
from benchmarks.picture import new_axes, save
from benchmarks.restore import STOCK, measure

_COLORS = {"stock": "#8a8a8a", "kvq": "#1b6ca8", "bare": "#c8553d"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The timings of one shape and length: of stock, of kvq, and of a bare read of kvq's files."""

    shape: str
    tokens: int
    timings: Sequence[Timing]


def run(
    sizes: Sequence[tuple[str, Sequence[int]]],
    *,
    codec: str,
    runs: int,
    folder: str | None,
    rows_file: Path | None,
    plot: Path | None,
) -> None:
    """Print a table for each shape and length of `sizes`, and draw them all.

    The timings go to `rows_file`, so that another machine can draw them; without `sizes` they are
    those found there.
    """
    rows: list[Row] = []
    for shape, lengths in sizes:
        for tokens in lengths:
            timings = measure(shape, tokens, codec=codec, runs=runs, folder=folder, cold=False)
            rows.append(Row(shape=shape, tokens=tokens, timings=timings))
            show(f"restore {shape} {tokens} tokens {codec}", timings, against=STOCK)
    if rows_file is not None and rows:
        rows_file.write_text(json.dumps([asdict(row) for row in rows]))
    elif rows_file is not None:
        rows = [_row(**found) for found in json.loads(rows_file.read_text())]
    if plot is not None:
        draw(rows, plot)


def _row(shape: str, tokens: int, timings: Sequence[dict[str, Any]]) -> Row:
    return Row(shape=shape, tokens=tokens, timings=[Timing(**one) for one in timings])


def draw(rows: Sequence[Row], path: Path) -> None:
    """One field a shape; a line for each way, whose marks are medians and whose bars the range."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure, fields = new_axes(len(shapes))
    for field, shape in zip(fields, shapes, strict=True):
        chosen = [row for row in rows if row.shape == shape]
        tokens = [row.tokens for row in chosen]
        for way in zip(*(row.timings for row in chosen), strict=True):
            middle = [one.median for one in way]
            low = [one.median - min(one.seconds) for one in way]
            high = [max(one.seconds) - one.median for one in way]
            name = way[0].name
            field.errorbar(
                tokens,
                middle,
                yerr=(low, high),
                marker="o",
                capsize=3,
                color=_COLORS[name.split()[0]],
                linestyle="--" if name.startswith("bare") else "-",
                label=name,
            )
        field.set_title(shape, fontsize=10, loc="left")
        field.set_xlabel("tokens")
    fields[0].set_ylabel("seconds to evaluated caches")
    fields[0].legend(fontsize=8)
    save(figure, path)
