"""The picture of `quality`. Needs matplotlib, which nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.picture import save

if TYPE_CHECKING:
    from benchmarks.quality import Row

_COLORS = {"q8": "#1b6ca8", "q4": "#c8553d"}
_OTHER = "#8a8a8a"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Mean, 99th percentile and largest divergence of each way, and means by kind of text."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise SystemExit("drawing needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained"
    )
    for place, row in enumerate(reversed(rows)):
        one, color = row.all, _COLORS.get(row.name, _OTHER)
        left.plot([one.mean, one.most], [place, place], color=color, lw=1.5, alpha=0.5)
        for value, marker in ((one.mean, "o"), (one.p99, "|"), (one.most, "x")):
            left.plot(value, place, marker, color=color, ms=9, mew=2)
    left.set_yticks(
        range(len(rows)),
        [f"{row.name}, {row.layers} ({row.bits:.1f} bits)" for row in reversed(rows)],
    )
    left.set_title("o mean   | 99th percentile   x largest", fontsize=10, loc="left")
    kinds = list(rows[0].scores)
    for row in rows:
        if row.layers == "all" or row.name not in _COLORS:
            means = [row.scores[kind].mean for kind in kinds]
            color = _COLORS.get(row.name, _OTHER)
            style = "-" if row.layers == "all" else "--" if "8" in row.name else ":"
            right.plot(kinds, means, f"o{style}", color=color, label=f"{row.name}, {row.layers}")
    right.set_title("mean by kind of text", fontsize=10, loc="left")
    right.legend(fontsize=8)
    for axis, log in ((left, left.set_xscale), (right, right.set_yscale)):
        log("log")
        axis.grid(alpha=0.3, which="major")
        axis.spines[["top", "right"]].set_visible(False)
    left.set_xlabel("KL divergence of a prediction, nats")
    save(figure, path)
