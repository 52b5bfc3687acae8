"""`quality`: how far each codec moves a real model's predictions, on texts of several kinds.

Of each text, all but the last tokens are read exactly. Then the rest is read three times and more:
on the exact caches, on caches that went through a codec, and on mlx-lm's own quantized caches. What
the model says at each of these tokens is compared as `kvq.codec.quality` lays out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache
from rich.console import Console
from rich.table import Table

import kvq
from benchmarks.measure import machine
from benchmarks.texts import KINDS
from kvq import codec as codecs
from kvq.cache.refill import refill, through, unchanged
from kvq.codec.quality import compare
from kvq.exchange.record import record
from kvq.prefill.spaces import ModelSpaces
from kvq.store import Space, Store

CHUNK = 512
#: Predictions compared at a time; a row of logits has 262,144 numbers.
SLICE = 64

#: New caches from exact ones that cover so many tokens.
Way = Callable[[Any, Sequence[Any], int], Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Divergence in nats of each prediction, and whether its likeliest token is the same."""

    kl: np.ndarray
    agrees: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def p99(self) -> float:
        return float(np.percentile(self.kl, 99))

    @property
    def most(self) -> float:
        return float(self.kl.max())

    @property
    def top1(self) -> float:
        return float(self.agrees.mean())

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        return cls(
            kl=np.concatenate([part.kl for part in parts]),
            agrees=np.concatenate([part.agrees for part in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of keeping caches: what it is called, bits a value, and scores by kind of text."""

    name: str
    layers: str
    bits: float
    scores: Mapping[str, Scores]

    @property
    def all(self) -> Scores:
        return Scores.joined(list(self.scores.values()))


def run(model: str, *, tokens: int, tail: int, plot: Path | None) -> None:
    """Print the table, and draw it to `plot`. `tokens` are read of each text, `tail` compared."""
    llm = kvq.open(model)
    ways = _ways()
    scores: dict[tuple[str, str], dict[str, Scores]] = {key: {} for key in ways}
    bits: dict[str, float] = {}
    for kind, text in KINDS.items():
        ids = llm.encode(text())[:tokens]
        if len(ids) < tokens:
            raise SystemExit(f"the text {kind!r} has {len(ids)} tokens only: lower --tokens")
        start = tokens - tail
        exact = _prefilled(llm.model, ids[:start])
        bits = bits or _bits(llm, exact, ids[:start])
        rest = mx.array(ids[start:])[None]
        expected = _logits(llm.model, rest, refill(llm.model, exact, start, unchanged))
        for key, way in ways.items():
            logits = _logits(llm.model, rest, way(llm.model, exact, start))
            scores[key][kind] = _compared(expected, logits)
            del logits
            mx.clear_cache()
    rows = [
        Row(name=name, layers=layers, bits=bits[name], scores=scores[name, layers])
        for name, layers in ways
    ]
    console = Console(width=110)
    console.print(_table(rows, len(KINDS) * tokens, len(KINDS) * tail))
    console.print(_by_kind(rows))
    console.print(f"mlx_lm.generate --kv-bits 8: {_own_kv_bits(llm)}")
    if plot is not None:
        from benchmarks.quality_plot import draw

        draw(rows, plot)
        console.print(f"drawn to {plot}")


def _ways() -> dict[tuple[str, str], Way]:
    """By name and by the layers that are not exact."""
    ways: dict[tuple[str, str], Way] = {}
    for name in ("q8", "q4"):
        for layers in ("all", "full", "window"):
            ways[name, layers] = _stored(name, layers)
    for bits in (8, 4):
        ways[f"mlx-lm {bits}-bit", "full"] = _quantized(bits)
    return ways


def _stored(name: str, layers: str) -> Way:
    """Caches as they come back from a store with that codec, some layers exact."""

    def way(model: Any, exact: Sequence[Any], tokens: int) -> Sequence[Any]:
        lossy = refill(model, exact, tokens, through(codecs.get(name)))
        kept = refill(model, exact, tokens, unchanged)
        return [
            one if layers in ("all", _kind(one)) else other
            for one, other in zip(lossy, kept, strict=True)
        ]

    return way


def _quantized(bits: int) -> Way:
    """mlx-lm's own quantized caches in the layers that have one; what follows is quantized too."""

    def way(model: Any, exact: Sequence[Any], tokens: int) -> Sequence[Any]:
        kept = refill(model, exact, tokens, unchanged)
        return [
            one.to_quantized(group_size=64, bits=bits) if _kind(one) == "full" else one
            for one in kept
        ]

    return way


def _kind(cache: Any) -> str:
    return "full" if isinstance(cache, KVCache) else "window"


def _prefilled(model: Any, ids: np.ndarray) -> Sequence[Any]:
    caches = make_prompt_cache(model)
    for low in range(0, len(ids), CHUNK):
        model(mx.array(ids[low : low + CHUNK])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    return caches


def _logits(model: Any, ids: mx.array, caches: Sequence[Any]) -> mx.array:
    logits = model(ids, cache=caches)[0]
    mx.eval(logits)
    return logits


def _compared(exact: mx.array, lossy: mx.array) -> Scores:
    kl, agrees = [], []
    for low in range(0, exact.shape[0], SLICE):
        part = compare(exact[low : low + SLICE], lossy[low : low + SLICE])
        kl.append(part[0])
        agrees.append(part[1])
    return Scores(kl=np.concatenate(kl), agrees=np.concatenate(agrees))


def _bits(llm: kvq.LLM, caches: Sequence[Any], ids: np.ndarray) -> dict[str, float]:
    """Bits a value: of the files that a store really has, headers included, and in mlx-lm."""
    found = {}
    with tempfile.TemporaryDirectory() as temp:
        for name in ("q8", "q4"):
            store = Store.create(Path(temp) / name)
            space = ModelSpaces(llm.loaded).of(name)
            record(store, space, caches, ids, kept=(len(ids),), logits=None)
            files = list(store.space_folder(space).rglob("*.safetensors"))
            size = sum(path.stat().st_size for path in files)
            found[name] = 8 * size / _values(space, caches)
    for bits in (8, 4):
        one = next(cache for cache in caches if _kind(cache) == "full")
        quantized = one.to_quantized(group_size=64, bits=bits)
        values = one.keys.size + one.values.size
        found[f"mlx-lm {bits}-bit"] = 8 * quantized.nbytes / values
    return found


def _values(space: Space, caches: Sequence[Any]) -> int:
    """Numbers in all rows that the caches hold."""
    total = 0
    for leaf, cache in zip(space.leaves, caches, strict=True):
        assert leaf.keys is not None
        assert leaf.values is not None
        rows = cache.offset if _kind(cache) == "full" else cache.keys.shape[2]
        total += rows * sum(heads * dim for heads, dim in (leaf.keys, leaf.values))
    return total


def _own_kv_bits(llm: kvq.LLM) -> str:
    """What mlx-lm says when it is asked to quantize this model's caches."""
    try:
        ids = mx.array(llm.encode("One, two, three"))
        list(generate_step(ids, llm.model, max_tokens=2, kv_bits=8, quantized_kv_start=0))
    except Exception as error:  # whatever it raises is the answer
        return f"{type(error).__name__}: {error}"
    return "runs"


def _table(rows: Sequence[Row], tokens: int, predictions: int) -> Table:
    title = f"{predictions:,} predictions in {tokens:,} tokens of {len(KINDS)} texts\n{machine()}"
    table = Table(title=title, title_justify="left", title_style="")
    for column in ("caches", "lossy layers", "bits/value", "mean KL", "p99 KL", "max KL", "top-1"):
        table.add_column(column, justify="left" if column in _WORDS else "right")
    for row in rows:
        one = row.all
        figures = (f"{value:.2g}" for value in (one.mean, one.p99, one.most))
        table.add_row(row.name, row.layers, f"{row.bits:.2f}", *figures, f"{one.top1:.1%}")
    return table


def _by_kind(rows: Sequence[Row]) -> Table:
    table = Table(title="mean KL by kind of text", title_justify="left", title_style="")
    for column in ("caches", "lossy layers", *KINDS):
        table.add_column(column, justify="left" if column in _WORDS else "right")
    for row in rows:
        table.add_row(row.name, row.layers, *(f"{row.scores[kind].mean:.2g}" for kind in KINDS))
    return table


_WORDS = ("caches", "lossy layers")
