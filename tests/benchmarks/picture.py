"""What the pictures have in common. Needs matplotlib, which nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def new_axes(count: int) -> tuple[Any, list[Any]]:
    """A figure and `count` fields beside each other, both scales logarithmic, of tokens."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise SystemExit("drawing needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    width = 11 if count > 1 else 6.5
    figure, fields = plt.subplots(
        1, count, figsize=(width, 4.2), layout="constrained", squeeze=False
    )
    for field in fields[0]:
        field.set_xscale("log", base=2)
        field.set_yscale("log")
        field.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
        field.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        field.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
        field.yaxis.set_minor_formatter(NullFormatter())
        field.grid(alpha=0.3, which="major")
        field.spines[["top", "right"]].set_visible(False)
    return figure, list(fields[0])


def save(figure: Any, path: Path) -> None:
    """Write the PNG, made small: few colors are enough, and a checked-in picture stays for ever."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    with Image.open(path) as image:
        image.convert("RGB").quantize(48).save(path, optimize=True)
