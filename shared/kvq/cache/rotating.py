"""A sliding-window cache that keeps its keys and values quantized."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

Quantized = tuple[mx.array, mx.array, mx.array]


class QuantizedRotatingKVCache:
    """mlx-lm's RotatingKVCache over codes, scales and biases.

    Each of the three lies in a RotatingKVCache of its own and the three move in step, so order,
    `keep`, trimming and masks are mlx-lm's own. `bits` and `group_size` are what routes an
    attention through mlx-lm's quantized kernel.
    """

    def __init__(
        self, max_size: int, keep: int = 0, *, group_size: int = 64, bits: int = 8
    ) -> None:
        self.group_size = group_size
        self.bits = bits
        self.lanes = tuple(RotatingKVCache(max_size=max_size, keep=keep) for _ in range(3))

    @classmethod
    def of(cls, cache: RotatingKVCache, *, group_size: int, bits: int) -> QuantizedRotatingKVCache:
        """The same window, quantized. `cache` keeps its arrays."""
        quantized = cls(cache.max_size, cache.keep, group_size=group_size, bits=bits)
        if cache.keys is None:
            return quantized
        keys, values = (
            mx.quantize(x, group_size=group_size, bits=bits) for x in (cache.keys, cache.values)
        )
        for lane, *pair in zip(quantized.lanes, keys, values, strict=True):
            lane.state = (*pair, *cache.state[2:])
        return quantized

    @classmethod
    def holding(
        cls,
        keys: Quantized,
        values: Quantized,
        *,
        max_size: int,
        keep: int,
        tokens: int,
        group_size: int,
        bits: int,
    ) -> QuantizedRotatingKVCache:
        """The window after `tokens` tokens: codes, scales and biases in the order of the tokens.

        Each is [1, heads, rows, n]: the first `keep` tokens, where there are any, then the newest.
        """
        cache = cls(max_size, keep, group_size=group_size, bits=bits)
        for lane, *pair in zip(cache.lanes, keys, values, strict=True):
            lane.state = (*pair, tokens, keep, max_size, pair[0].shape[2])
        return cache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Append keys and values [1, heads, tokens, dim]; the window's codes, scales, biases."""
        pairs = zip(
            mx.quantize(keys, group_size=self.group_size, bits=self.bits),
            mx.quantize(values, group_size=self.group_size, bits=self.bits),
            strict=True,
        )
        moved = [lane.update_and_fetch(*pair) for lane, pair in zip(self.lanes, pairs, strict=True)]
        return _turn(moved)

    def keys_and_values(self) -> tuple[Quantized, Quantized]:
        """The codes, scales and biases of keys and of values, unused rows left out."""
        return _turn([lane.keys_and_values() for lane in self.lanes])

    @property
    def keys(self) -> Quantized | None:
        return None if self.empty() else _turn([(x.keys, x.values) for x in self.lanes])[0]

    @property
    def values(self) -> Quantized | None:
        return None if self.empty() else _turn([(x.keys, x.values) for x in self.lanes])[1]

    @property
    def offset(self) -> int:
        """Tokens seen so far; at most `max_size` of them are held between steps."""
        return int(self.lanes[0].offset)

    @property
    def max_size(self) -> int:
        return int(self.lanes[0].max_size)

    @property
    def keep(self) -> int:
        return int(self.lanes[0].keep)

    @property
    def state(self) -> tuple[Any, ...]:
        return (*(lane.state for lane in self.lanes), self.group_size, self.bits)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        *lanes, self.group_size, self.bits = state
        self.lanes = tuple(RotatingKVCache.from_state(lane) for lane in lanes)

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> QuantizedRotatingKVCache:
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def size(self) -> int:
        return int(self.lanes[0].size())

    def empty(self) -> bool:
        return bool(self.lanes[0].empty())

    def is_trimmable(self) -> bool:
        return bool(self.lanes[0].is_trimmable())

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, fewer when fewer are held; how many were forgotten."""
        return min(int(lane.trim(n)) for lane in self.lanes)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.lanes[0].make_mask(*args, **kwargs)

    @property
    def nbytes(self) -> int:
        return sum(int(lane.nbytes) for lane in self.lanes)


def _turn(pairs: list[tuple[mx.array, mx.array]]) -> tuple[Quantized, Quantized]:
    """Three (keys, values) pairs as the triple of keys and the triple of values."""
    codes, scales, biases = pairs
    return (codes[0], scales[0], biases[0]), (codes[1], scales[1], biases[1])
