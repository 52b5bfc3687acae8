"""Where restored rows land: one array for each leaf's keys and values, filled block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvq import codec as codecs
from kvq.cache import convert
from kvq.cache.adapters import STEP, Rows, adapter_of
from kvq.cache.blank import blank
from kvq.cache.device import is_discrete
from kvq.cache.groups import Group
from kvq.codec import LayerCoding
from kvq.codec.live import Codes, codes
from kvq.store.space import Leaf


@dataclass(frozen=True)
class Coded:
    """One side of a group for some tokens from `start` on, as a codec's parts."""

    start: int
    parts: Mapping[str, mx.array]
    coding: LayerCoding

    @property
    def tokens(self) -> int:
        return sum(self.parts[name].shape[2] for name in ("", "sink", "q") if name in self.parts)


class Landing:
    """The arrays of one group for a cache of `tokens` tokens.

    Full-attention leaves hold every row and are padded to a multiple of 256 tokens, as mlx-lm's
    attention kernels like them. Window leaves hold the newest `window` rows, of which the first
    `keep` are the prompt's first.
    """

    def __init__(self, group: Group, tokens: int) -> None:
        self.group = group
        self.ranges = _ranges(group, tokens)
        self.rows = sum(stop - start for start, stop in self.ranges)
        padded = -(-self.rows // STEP) * STEP if group.record == "kv" else self.rows
        self._arrays = [
            blank([(1, side.heads, padded, side.dim)] * len(group.leaves), _word(side.mlx_dtype))
            for _, side in group.sides()
        ]
        if padded > self.rows and not is_discrete():
            for array in self.arrays():
                np.array(array, copy=False)[:, :, self.rows :] = 0
        self._views: list[list[npt.NDArray[Any]]] | None = None

    def open_views(self) -> None:
        """Prepare for `slabs` and `put_host`, on the thread that runs MLX.

        While views are open, `put` would copy whole arrays: use one or the other.
        """
        self._views = [[np.array(one, copy=False) for one in side] for side in self._arrays]

    def slabs(self, side: int, start: int, count: int) -> list[memoryview] | None:
        """Where the rows of `count` tokens from `start` on go, as bytes: a view a leaf and head.

        In the order of the rows in a file. None when they do not all go to one place.
        """
        places = list(self._places(start, count))
        if len(places) != 1 or places[0][2] - places[0][1] != count:
            return None
        at = places[0][0]
        return [
            head[at : at + count].reshape(-1).view(np.uint8).data
            for view in self._opened(side)
            for head in view[0]
        ]

    def put_host(self, side: int, start: int, rows: npt.NDArray[Any]) -> None:
        """Copy host rows (unsigned words, [layers, heads, n, dim]) of the tokens from `start` on.

        Touches no MLX object, so any thread may call it.
        """
        for at, low, high in self._places(start, rows.shape[2]):
            for index, view in enumerate(self._opened(side)):
                view[0, :, at : at + high - low] = rows[index, :, low:high]

    def accept(self, side: int, pieces: Sequence[Coded]) -> None:
        """Decode pieces of the prompt, in its order, and put them in place. Lazy.

        Neighbours go there together: each leaf's array is written to once, not once a block.
        """
        dtype = self.group.sides()[side][1].mlx_dtype
        for run in _runs(pieces):
            rows = [codecs.decode(piece.parts, piece.coding, dtype) for piece in run]
            self.put(side, run[0].start, mx.concatenate(rows, axis=2))

    def put(self, side: int, start: int, rows: mx.array) -> None:
        """Copy device rows of the tokens from `start` on. Lazy: evaluate `arrays()`."""
        for at, low, high in self._places(start, rows.shape[2]):
            for index in range(len(self.group.leaves)):
                word = rows[index : index + 1, :, low:high].view(_word(rows.dtype))
                self._arrays[side][index][:, :, at : at + high - low] = word

    def arrays(self) -> list[mx.array]:
        return [array for side in self._arrays for array in side]

    def hand_over(self, caches: list[Any], leaves: Sequence[Leaf], tokens: int) -> None:
        """Fill the group's caches, which cover `tokens` tokens then."""
        for index, rows in self.leaf_rows():
            cache = convert.at(caches, leaves[index].path)
            adapter = adapter_of(cache)
            assert adapter is not None
            adapter.fill(cache, rows, tokens)

    def leaf_rows(self) -> Iterator[tuple[int, Rows]]:
        """(leaf index, its rows) of every leaf; the landing gives its arrays away."""
        self._views = None
        dtypes = [side.mlx_dtype for _, side in self.group.sides()]
        for index, leaf in enumerate(self.group.leaves):
            keys, values = (
                side[index].view(dtype) for side, dtype in zip(self._arrays, dtypes, strict=True)
            )
            yield leaf, Rows(keys, values)
        self._arrays = [[], []]

    def _opened(self, side: int) -> list[npt.NDArray[Any]]:
        assert self._views is not None
        return self._views[side]

    def _places(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(row in the landing, first, last row of what came) for tokens [start, start + count)."""
        base = 0
        for first, last in self.ranges:
            low, high = max(first, start), min(last, start + count)
            if low < high:
                yield base + low - first, low - start, high - start
            base += last - first


class LiveLanding(Landing):
    """Codes as they rest, for caches that stay quantized: nothing is decoded and coded again."""

    def __init__(self, group: Group, tokens: int, coding: LayerCoding) -> None:
        self.group = group
        self.ranges = _ranges(group, tokens)
        self._how = {"bits": coding.bits, "group_size": coding.group_size}
        self._codes: tuple[list[Codes], list[Codes]] = ([], [])

    def accept(self, side: int, pieces: Sequence[Coded]) -> None:
        dtype = self.group.sides()[side][1].mlx_dtype
        for piece in pieces:
            for _, low, high in self._places(piece.start, piece.tokens):
                parts = codecs.take(piece.parts, low, high)
                self._codes[side].append(codes(parts, piece.coding, dtype))

    def arrays(self) -> list[mx.array]:
        return [array for side in self._codes for triple in side for array in triple]

    def hand_over(self, caches: list[Any], leaves: Sequence[Leaf], tokens: int) -> None:
        keys, values = (
            [mx.concatenate(list(same), axis=2) for same in zip(*side, strict=True)]
            for side in self._codes
        )
        for place, index in enumerate(self.group.leaves):
            path = leaves[index].path
            live = convert.from_codes(
                convert.at(caches, path),
                _leaf(keys, place),
                _leaf(values, place),
                tokens=tokens,
                **self._how,
            )
            convert.put(caches, path, live)


def _leaf(group: Sequence[mx.array], place: int) -> Codes:
    """One leaf's codes, scales and biases out of its group's."""
    q, s, b = (array[place : place + 1] for array in group)
    return q, s, b


def _runs(pieces: Sequence[Coded]) -> Iterator[list[Coded]]:
    """The pieces in runs without gaps."""
    run: list[Coded] = []
    for piece in pieces:
        if run and run[-1].start + run[-1].tokens != piece.start:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _ranges(group: Group, tokens: int) -> Sequence[tuple[int, int]]:
    if group.record == "kv" or tokens <= group.window:
        return [(0, tokens)]
    newest = tokens - (group.window - group.keep)
    return [(0, group.keep), (newest, tokens)] if group.keep else [(newest, tokens)]


def _word(dtype: mx.Dtype) -> mx.Dtype:
    """The unsigned integer of the same size: rows are moved as bits (numpy has no bfloat16)."""
    word: mx.Dtype = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[dtype.size]
    return word
