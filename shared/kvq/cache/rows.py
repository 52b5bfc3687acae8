"""The newest rows of one group that no finished block holds yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvq.cache.adapters import Rows, adapter_of
from kvq.cache.groups import Group


class GroupRows:
    """Rows [layers, heads, tokens, dim] of the tokens [low, end), grown chunk by chunk."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.end = 0
        self._rows: Rows | None = None

    @property
    def low(self) -> int:
        """Position (tokens) of the first row at hand."""
        return self.end - (self._rows.keys.shape[2] if self._rows else 0)

    def arrays(self) -> list[mx.array]:
        return list(self._rows) if self._rows else []

    def take(self, leaves: Sequence[Any], count: int, end: int) -> None:
        """Add the newest `count` tokens, which end at `end`, or as many as a window holds."""
        caches = [leaves[index] for index in self.group.leaves]
        count = min([count, *(_held(cache) for cache in caches)])
        self.end = end
        if count == 0:
            return
        newest = [_newest(cache, count) for cache in caches]
        keys = mx.concatenate([rows.keys for rows in newest], axis=0)
        values = mx.concatenate([rows.values for rows in newest], axis=0)
        if self._rows is not None:
            keys = mx.concatenate([self._rows.keys, keys], axis=2)
            values = mx.concatenate([self._rows.values, values], axis=2)
        self._rows = Rows(keys, values)

    def between(self, start: int, stop: int) -> Rows:
        """Rows of the tokens [max(start, low), stop)."""
        assert self._rows is not None
        first, last = max(start, self.low) - self.low, stop - self.low
        return Rows(self._rows.keys[:, :, first:last], self._rows.values[:, :, first:last])

    def drop_before(self, position: int) -> None:
        """Forget the rows of tokens before `position`."""
        if self._rows is not None and position > self.low:
            first = position - self.low
            rows = Rows(self._rows.keys[:, :, first:], self._rows.values[:, :, first:])
            self._rows = rows if position < self.end else None


def _held(cache: Any) -> int:
    adapter = adapter_of(cache)
    assert adapter is not None
    return adapter.held(cache)


def _newest(cache: Any, count: int) -> Rows:
    adapter = adapter_of(cache)
    assert adapter is not None
    return adapter.newest(cache, count)
