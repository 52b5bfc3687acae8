"""Writes shared/ARCHITECTURES.md: what was measured on every architecture of the zoo.

    python tests/support_table.py

The oracle tests measure each row again and compare it with the file.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import zoo
from oracle import ROUNDING, Bench, cuts, feed, short_bench
from zoo import CACHE_CLASSES, Architecture

import kvq
from kvq.errors import CannotTrim

FILE = Path(__file__).parents[1] / "shared" / "ARCHITECTURES.md"
_HEAD = """\
# Architectures

What kvq does on each model architecture of mlx-lm. `python tests/support_table.py` writes this
page: it prefills a tiny random float32 model of each into a store with codec `raw` (MLX on a CPU),
resumes it at many cuts, and compares the logits with a run that was never interrupted. The tests
measure every row again.

- **Caches**: which ones mlx-lm makes for the tiny model; `+` joins those of one layer. How many
  there are of each depends on a model's size.
- **Exact**: `bit for bit` means that the logits have the same bits wherever the chunks fall alike.
  Where they fall differently, they are within 1e-4 of the largest logit, except where the notes say
  that mlx-lm itself then computes something else.
- **Cut**: where a stored prompt can be resumed. *Any token*. *Any token near a kept position*:
  within 256 tokens before one, or anywhere if it was stored with `--window-records all`. *Kept
  positions* only: the end of a prompt, its last block boundary, branch points, and those asked for.
- **Trim**: whether `kvq.trim` can shorten a loaded cache in memory. *Reload* means that it refuses,
  because a sliding window has dropped rows or a recurrent state cannot go back, and that
  `match.load(model, upto=n)` is the way.
- **Live**: how many of the tiny model's caches `KVCacheContainer.maybe_quantize` keeps quantized
  while the model runs. The store's codecs work on the keys and values of all of them.

| Architecture | Caches | Exact | Cut | Trim | Live | Notes |
|---|---|---|---|---|---|---|
"""

_REFUSED = """
Refused by name before any prefill, because their caches are no class of mlx-lm's cache module:
"""

_MISSING = """
Not measured:
"""


def row(bench: Bench) -> str:
    """The table's line for one architecture, measured on a stored prompt that wraps its windows."""
    architecture = bench.architecture
    cells = (
        f"`{architecture.name}`",
        _caches(architecture.caches),
        _exact(bench),
        _cut(architecture),
        _trim(bench),
        _live(bench),
        architecture.notes,
    )
    return f"| {' | '.join(cells)} |"


def render(rows: list[str]) -> str:
    """The whole page."""
    refused = [f"- `{one.name}` ({_caches(one.caches)})" for one in zoo.FOREIGN]
    missing = [f"- `{name}`: {reason}" for name, reason in zoo.MISSING.items()]
    return "".join(
        (
            _HEAD,
            "\n".join(rows) + "\n",
            _REFUSED,
            "\n".join(["", *refused]) + "\n",
            _MISSING,
            "\n".join(["", *missing]) + "\n",
        )
    )


def _caches(letters: str) -> str:
    """Such as "3 RotatingKVCache, KVCache": how many caches there are of each class."""
    depth, layers = 0, [""]
    for letter in letters:
        if letter in "()":
            depth += 1 if letter == "(" else -1
        else:
            layers[-1] += CACHE_CLASSES[letter][0] + " + "
        if depth == 0:
            layers.append("")
    counts = Counter(layer.removesuffix(" + ") for layer in layers if layer)
    return ", ".join(f"{n} {layer}" if n > 1 else layer for layer, n in counts.items())


def _exact(bench: Bench) -> str:
    worst = max(bench.deviation_at(cut) for cut in cuts(bench) if cut in bench.ends)
    return "bit for bit" if worst == 0.0 else "within 1e-4" if worst <= ROUNDING else "NO"


def _cut(architecture: Architecture) -> str:
    if "state" in architecture.kinds:
        return "kept positions"
    return "any token" if architecture.kinds == {"kv"} else "any token near a kept position"


def _trim(bench: Bench) -> str:
    caches = bench.match().load(bench.model)
    try:
        kvq.trim(caches, 1)
    except CannotTrim:
        return "reload"
    return "any token"


def _live(bench: Bench) -> str:
    caches = bench.match().load(bench.model)
    report = caches.bind(bench.model).maybe_quantize(bits=8)
    feed(bench.model, caches, bench.ids, bench.tokens, bench.after)
    active = sum(one.state == "active" for one in report)
    return f"{active} of {len(report)}"


def written_rows() -> list[str]:
    """The rows that the checked-in page has."""
    return [line for line in FILE.read_text().splitlines() if line.startswith("| `")]


def main() -> None:
    rows = []
    for architecture in zoo.ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(short_bench(architecture, Path(folder))))
        print(rows[-1], flush=True)
    FILE.write_text(render(rows))


if __name__ == "__main__":
    main()
