"""Caches as they were some tokens ago, exact or as a codec gives them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvq.cache.adapters import Rows, adapter_of
from kvq.cache.device import memory_bytes
from kvq.cache.groups import groups_of
from kvq.cache.leaves import leaf_caches
from kvq.cache.refill import Transform, copied
from kvq.cache.rows import GroupRows
from kvq.store.keys import BLOCK
from kvq.store.space import Leaf

#: The part of the device's memory that rows may be of which are changed together, unless those of
#: one layer are more: a change needs many times their memory.
_ROWS_PART = 256


class Rewind:
    """Takes from caches that go on what `caches` needs to make others that end at `start` tokens.

    Full layers keep every row themselves. Of windows the rows are taken, from the first block of
    which `start` sees a token, and those past `start` too: a codec sees whole blocks, as in a file.
    """

    def __init__(self, leaves: Sequence[Leaf], start: int) -> None:
        self.start = start
        groups = groups_of(leaves)
        self._full = [one for one in groups if one.record == "kv"]
        self._windows = [GroupRows(one) for one in groups if one.record == "window"]
        self._first: dict[int, Rows] = {}
        self._states: dict[int, list[mx.array | None]] = {}

    def watch(self, caches: Sequence[Any], position: int) -> None:
        """Take what is new in `caches`, which are at `position` tokens. Lazy.

        Call it before the first chunk and after each; a chunk has to end at `start`.
        """
        leaves = leaf_caches(caches)
        for rows in self._windows:
            low = max(0, self.start - rows.group.window) // BLOCK * BLOCK
            if position > low:
                rows.take(leaves, position - max(low, rows.end), position)
        if position != self.start:
            return
        for index, leaf in enumerate(leaves):
            adapter = adapter_of(leaf)
            if adapter is None:
                self._states[index] = copied(leaf.cache)
            elif leaf.keys is not None and (keep := adapter.window(leaf)[1]):
                keys, values = adapter.rows(leaf)
                self._first[index] = Rows(keys[:, :, :keep], values[:, :, :keep])

    def arrays(self) -> list[mx.array]:
        """What was taken: evaluate it with the chunk."""
        states = [array for state in self._states.values() for array in state if array is not None]
        firsts = [side for rows in self._first.values() for side in rows]
        return [*states, *firsts, *(array for rows in self._windows for array in rows.arrays())]

    def caches(self, model: Any, caches: Sequence[Any], change: Transform) -> Sequence[Any]:
        """New caches of `model` at `start`, from those that were watched, their rows changed.

        Recurrent states are as they were. Lazy: let go of the new caches before what a model makes
        of them is evaluated, and what was changed is in memory for some layers at a time only.
        """
        copies: Sequence[Any] = make_prompt_cache(model)
        old, new = leaf_caches(caches), leaf_caches(copies)
        for index, state in self._states.items():
            new[index].cache = copied(state)
        for index, rows in self._changed(change).items():
            _fill(new[index], rows, self.start)
        for group in self._full:
            held = {index: _rows(old[index]) for index in group.leaves}
            for batch in _batches(held, memory_bytes() // _ROWS_PART):
                pairs = zip(*(held[index] for index in batch), strict=True)
                stacks = (mx.concatenate(list(side), axis=0) for side in pairs)
                changed = [change(stack, 0)[:, :, : self.start] for stack in stacks]
                for number, index in enumerate(batch):
                    own = Rows(*(side[number : number + 1] for side in changed))
                    _fill(new[index], own, self.start)
        return copies

    def _changed(self, change: Transform) -> dict[int, Rows]:
        """Of each window leaf the rows that `start` sees."""
        found = {}
        for rows in self._windows:
            window, keep, low = rows.group.window, rows.group.keep, rows.low
            # A window that is full has the prompt's first tokens before a gap.
            newest = window - keep if self.start > window else self.start
            cut = slice(max(0, self.start - newest - low), self.start - low)
            sides = [change(side, low)[:, :, cut] for side in rows.between(low, rows.end)]
            for number, leaf in enumerate(rows.group.leaves):
                own = [side[number : number + 1] for side in sides]
                if keep and self.start > window:
                    pairs = zip(self._first[leaf], own, strict=True)
                    own = [
                        mx.concatenate([change(first, 0), side], axis=2) for first, side in pairs
                    ]
                found[leaf] = Rows(*own)
        return found


def _batches(held: Mapping[int, Rows], limit: int) -> Iterator[list[int]]:
    """The leaves in runs whose rows are of at most `limit` bytes, or of one leaf."""
    batch: list[int] = []
    size = 0
    for index, rows in held.items():
        nbytes = sum(side.nbytes for side in rows)
        if batch and size + nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += nbytes
    if batch:
        yield batch


def _rows(cache: Any) -> Rows:
    adapter = adapter_of(cache)
    assert adapter is not None
    return adapter.rows(cache)


def _fill(cache: Any, rows: Rows, tokens: int) -> None:
    adapter = adapter_of(cache)
    assert adapter is not None
    adapter.fill(cache, rows, tokens)
