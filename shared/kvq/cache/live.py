"""Quantizing the layers of a prompt cache while it is in use: each that can be, once, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from kvq.cache.convert import Path, at, group_size_of, is_quantized, put, quantized, refusal
from kvq.cache.leaves import iter_leaves
from kvq.cache.probe import unfit_layers
from kvq.codec import GROUP_SIZES
from kvq.errors import UsageError

#: The widths that MLX's quantized kernels take.
BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What became of one cache.

    `layer` is its index in the prompt cache and `path` the whole way to it, longer than one step
    inside a CacheList. `cache` is its class now. A state of "active" means that it runs
    quantized, "pending" that it will once it holds enough tokens, "skipped" that it cannot;
    `reason` says why, also where an active layer has another group size than was asked for.
    """

    path: Path
    cache: str
    state: Literal["active", "pending", "skipped"]
    reason: str = ""
    bits: int | None = None
    group_size: int | None = None

    @property
    def layer(self) -> int:
        return self.path[0]


class LiveQuantizer:
    """Quantizes the caches in a list, the list itself, so that everyone who holds it sees it.

    Remembers what it decided, so one quantizer goes with one list. `model` is needed to find out
    which layers can run quantized; until it is known they wait.
    """

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self._asked: tuple[int, int, int] | None = None
        self._rows: dict[Path, LayerReport] = {}
        self._pending: list[Path] = []

    @property
    def report(self) -> tuple[LayerReport, ...]:
        """One row a cache as of the last `step`, in the order of the layers."""
        return tuple(self._rows.values())

    def step(
        self, caches: list[Any], *, bits: int, group_size: int, start: int
    ) -> tuple[LayerReport, ...]:
        """Quantize each layer that can be and holds at least `start` tokens; return the report.

        Once no layer is pending this costs one comparison.
        Raises UsageError for a width or a group size that MLX does not have.
        """
        asked = (bits, group_size, start)
        if asked != self._asked:
            self._begin(caches, bits, group_size, start)
        if any(at(caches, path).offset >= max(start, 1) for path in self._pending):
            self._convert(caches, bits, group_size, start)
        self._asked = asked
        return self.report

    def forget(self) -> None:
        """Look at every cache anew at the next step."""
        self._asked = None

    def convertible(self, caches: Sequence[Any], start: int) -> bool:
        """Is a cache left that its class allows to quantize, and that holds `start` tokens?"""
        return any(
            cache.offset >= start
            for path, cache in iter_leaves(caches)
            if not (is_quantized(cache) or refusal(cache) or self._skipped(path))
        )

    def _skipped(self, path: Path) -> bool:
        return path in self._rows and self._rows[path].state == "skipped"

    def _begin(self, caches: list[Any], bits: int, group_size: int, start: int) -> None:
        if bits not in BITS:
            raise UsageError(f"keys cannot be quantized to {bits!r} bits; MLX has {BITS}")
        if group_size not in GROUP_SIZES:
            raise UsageError(f"no group size {group_size!r}; MLX has {GROUP_SIZES}")
        waiting = f"waits for {start} tokens" if start > 1 else "waits for its first tokens"
        self._rows = {}
        for path, cache in iter_leaves(caches):
            row = LayerReport(path=path, cache=type(cache).__name__, state="pending")
            if is_quantized(cache):
                row = _active(row, cache, bits, group_size)
            elif reason := refusal(cache):
                row = replace(row, state="skipped", reason=reason)
            else:
                row = replace(row, reason=waiting)
            self._rows[path] = row
        self._pending = [path for path, row in self._rows.items() if row.state == "pending"]

    def _convert(self, caches: list[Any], bits: int, group_size: int, start: int) -> None:
        if self.model is None:
            reason = "waits for a model: whether its attention can run quantized must be tried"
            for path in self._pending:
                self._rows[path] = replace(self._rows[path], reason=reason)
            return
        unfit = unfit_layers(self.model, caches, bits=bits, group_size=group_size)
        for path in self._pending:
            row, cache = self._rows[path], at(caches, path)
            if path in unfit:
                self._rows[path] = replace(row, state="skipped", reason=unfit[path])
            elif cache.offset >= max(start, 1):
                size = group_size_of(cache, group_size)
                after = quantized(cache, bits=bits, group_size=size)
                mx.eval(after.state)  # layer by layer: never two copies of the whole cache
                put(caches, path, after)
                row = replace(row, cache=type(after).__name__)
                self._rows[path] = _active(row, after, bits, group_size)
        self._pending = [path for path in self._pending if self._rows[path].state == "pending"]


def _active(row: LayerReport, cache: Any, bits: int, group_size: int) -> LayerReport:
    reason = ""
    if cache.bits != bits:
        reason = f"was quantized to {cache.bits} bits before"
    elif cache.group_size != group_size:
        reason = f"groups of {cache.group_size}: {group_size} does not divide the head dims"
    return replace(row, state="active", reason=reason, bits=cache.bits, group_size=cache.group_size)
