"""One adapter for each cache class of mlx-lm: how its rows are read and put back.

A new class upstream is one new entry in `_ADAPTERS`. Rows are [1, heads, tokens, dim]; "newest"
counts back from the cache's offset, in the order of the tokens whatever order the buffer is in.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from kvq.cache.rotating import QuantizedRotatingKVCache
from kvq.errors import UnsupportedModel

#: KVCache grows in steps of so many tokens; a restored one is padded to a multiple of it.
STEP = int(mlx_cache.KVCache.step)


class Rows(NamedTuple):
    """Keys and values of consecutive tokens, each [1, heads, tokens, dim]."""

    keys: mx.array
    values: mx.array


class Adapter(Protocol):
    """Reads and fills the caches of one class. `record` is the record kind of its content."""

    record: str

    def window(self, cache: Any) -> tuple[int, int]:
        """How many newest and how many first tokens a restore needs; (0, 0) for all of them."""

    def held(self, cache: Any) -> int:
        """How many newest tokens' rows the cache holds without a gap."""

    def newest(self, cache: Any, count: int) -> Rows:
        """Rows of the newest `count` tokens. Lazy; does not change the cache."""

    def rows(self, cache: Any) -> Rows:
        """Every row held, in token order, the first `keep` before a gap. Lazy."""

    def fill(self, cache: Any, rows: Rows, tokens: int) -> None:
        """Make an empty cache hold `rows`, the newest of `tokens` tokens."""

    def turn(self, cache: Any) -> None:
        """Order a filled cache's rows as they lie after a token that was fed alone."""

    def spare(self, cache: Any) -> int:
        """How many newest tokens can be cut off with all rows that are then needed at hand."""

    def cut(self, cache: Any, count: int) -> None:
        """Cut off the newest `count` tokens, at most `spare`. Changes the cache."""


class Full:
    """KVCache: every token's row, at its own place."""

    record = "kv"

    def window(self, cache: Any) -> tuple[int, int]:
        return 0, 0

    def held(self, cache: Any) -> int:
        return int(cache.offset)

    def newest(self, cache: Any, count: int) -> Rows:
        low, high = cache.offset - count, cache.offset
        return Rows(cache.keys[..., low:high, :], cache.values[..., low:high, :])

    def rows(self, cache: Any) -> Rows:
        return self.newest(cache, self.held(cache))

    def fill(self, cache: Any, rows: Rows, tokens: int) -> None:
        cache.keys, cache.values, cache.offset = rows.keys, rows.values, tokens

    def turn(self, cache: Any) -> None:
        pass

    def spare(self, cache: Any) -> int:
        return int(cache.offset)

    def cut(self, cache: Any, count: int) -> None:
        cache.offset -= count


class Concatenated(Full):
    """ConcatenateKVCache: its arrays hold exactly its tokens, so padding is cut off again."""

    def fill(self, cache: Any, rows: Rows, tokens: int) -> None:
        keys, values = rows.keys[..., :tokens, :], rows.values[..., :tokens, :]
        cache.keys, cache.values, cache.offset = keys, values, tokens

    def cut(self, cache: Any, count: int) -> None:
        # Its own `trim` only moves the offset, which the next update forgets.
        self.fill(cache, Rows(cache.keys, cache.values), cache.offset - count)


class Quantized(Full):
    """QuantizedKVCache as input: its rows are read dequantized."""

    def newest(self, cache: Any, count: int) -> Rows:
        low, high = cache.offset - count, cache.offset

        def plain(parts: Any) -> mx.array:
            cut = [part[..., low:high, :] for part in parts]
            codes, scales, biases = cut
            how = {"group_size": cache.group_size, "bits": cache.bits}
            return mx.dequantize(codes, scales, biases, **how)

        return Rows(plain(cache.keys), plain(cache.values))

    def fill(self, cache: Any, rows: Rows, tokens: int) -> None:
        keys, values = rows.keys[..., :tokens, :], rows.values[..., :tokens, :]
        how = {"group_size": cache.group_size, "bits": cache.bits}
        cache.keys, cache.values = mx.quantize(keys, **how), mx.quantize(values, **how)
        cache.offset = tokens


class Rotating:
    """RotatingKVCache: the first `keep` tokens and the newest `max_size - keep`, rotated.

    Filled in token order, as after a chunk: what follows is then computed exactly as without
    the interruption, because the cache puts itself in that order before it takes a chunk.
    """

    record = "window"

    def window(self, cache: Any) -> tuple[int, int]:
        return int(cache.max_size), int(cache.keep)

    def held(self, cache: Any) -> int:
        rows = self._ordered(cache, cache.keys).shape[2]
        return int(cache.offset) if cache.offset <= rows else int(rows - cache.keep)

    def newest(self, cache: Any, count: int) -> Rows:
        keys, values = self._ordered(cache, cache.keys), self._ordered(cache, cache.values)
        low = keys.shape[2] - count
        return Rows(keys[..., low:, :], values[..., low:, :])

    def rows(self, cache: Any) -> Rows:
        return Rows(self._ordered(cache, cache.keys), self._ordered(cache, cache.values))

    def fill(self, cache: Any, rows: Rows, tokens: int) -> None:
        cache.keys, cache.values = rows
        cache.offset, cache._idx = tokens, rows.keys.shape[2]

    def turn(self, cache: Any) -> None:
        # Fed alone, a token overwrites the oldest row. A sum over the rows in another order rounds
        # otherwise, so without this the next token's logits would differ in their last bits.
        if cache.offset > cache.max_size:
            cache.keys, cache.values = self._turned(cache, cache.keys, cache.values)
            cache._idx = cache.keep + 1

    def spare(self, cache: Any) -> int:
        held = self.held(cache)
        if held == cache.offset:
            return held
        return max(0, held - int(cache.max_size - cache.keep))

    def cut(self, cache: Any, count: int) -> None:
        keys, values = self._ordered(cache, cache.keys), self._ordered(cache, cache.values)
        left = keys.shape[2] - count
        self.fill(cache, Rows(keys[..., :left, :], values[..., :left, :]), cache.offset - count)

    def _turned(self, cache: Any, *buffers: mx.array) -> list[mx.array]:
        keep = cache.keep
        return [
            mx.concatenate([one[..., :keep, :], one[..., -1:, :], one[..., keep:-1, :]], axis=2)
            for one in buffers
        ]

    def _ordered(self, cache: Any, buffer: mx.array) -> mx.array:
        ordered: mx.array = cache._temporal_order(buffer)
        return ordered


class Chunked:
    """ChunkedKVCache: the newest rows; the model drops all but `chunk_size` at each step."""

    record = "window"

    def window(self, cache: Any) -> tuple[int, int]:
        return int(cache.chunk_size), 0

    def held(self, cache: Any) -> int:
        return int(cache.offset - cache.start_position)

    def newest(self, cache: Any, count: int) -> Rows:
        high = cache.offset - cache.start_position
        return Rows(
            cache.keys[..., high - count : high, :], cache.values[..., high - count : high, :]
        )

    def rows(self, cache: Any) -> Rows:
        return self.newest(cache, self.held(cache))

    def fill(self, cache: Any, rows: Rows, tokens: int) -> None:
        cache.keys, cache.values = rows
        cache.offset, cache.start_position = tokens, tokens - rows.keys.shape[2]

    def turn(self, cache: Any) -> None:
        pass

    def spare(self, cache: Any) -> int:
        held = self.held(cache)
        return held if cache.start_position == 0 else max(0, held - cache.chunk_size)

    def cut(self, cache: Any, count: int) -> None:
        cache.offset -= count


class LiveRotating(Rotating):
    """QuantizedRotatingKVCache: three rotating lanes that move in step."""

    def held(self, cache: Any) -> int:
        return super().held(cache.lanes[0])

    def newest(self, cache: Any, count: int) -> Rows:
        cut = [super(LiveRotating, self).newest(lane, count) for lane in cache.lanes]
        how = {"group_size": cache.group_size, "bits": cache.bits}
        keys, values = (mx.dequantize(*side, **how) for side in zip(*cut, strict=True))
        return Rows(keys, values)

    def rows(self, cache: Any) -> Rows:
        return self.newest(cache, cache.lanes[0].keys.shape[2])

    def fill(self, cache: Any, rows: Rows, tokens: int) -> None:
        how = {"group_size": cache.group_size, "bits": cache.bits}
        sides = (mx.quantize(side, **how) for side in rows)
        for lane, keys, values in zip(cache.lanes, *sides, strict=True):
            super().fill(lane, Rows(keys, values), tokens)

    def turn(self, cache: Any) -> None:
        for lane in cache.lanes:
            super().turn(lane)

    def cut(self, cache: Any, count: int) -> None:
        for lane in cache.lanes:
            super().cut(lane, count)


_ADAPTERS: dict[type, Adapter] = {
    mlx_cache.KVCache: Full(),
    mlx_cache.ConcatenateKVCache: Concatenated(),
    mlx_cache.QuantizedKVCache: Quantized(),
    mlx_cache.RotatingKVCache: Rotating(),
    mlx_cache.ChunkedKVCache: Chunked(),
    QuantizedRotatingKVCache: LiveRotating(),
}
#: Recurrent states: arrays of any shape that cannot be cut.
_STATES: tuple[type, ...] = (mlx_cache.ArraysCache,)
_BATCHED = (mlx_cache.BatchKVCache, mlx_cache.BatchRotatingKVCache)


def adapter_of(cache: Any) -> Adapter | None:
    """The adapter of a cache with keys and values; None for a recurrent state.

    Raises UnsupportedModel for any class that kvq does not know.
    """
    if type(cache) in _STATES:
        return None
    found = _ADAPTERS.get(type(cache))
    if found is not None:
        return found
    name = type(cache).__name__
    if isinstance(cache, _BATCHED):
        raise UnsupportedModel(
            f"{name} holds several sequences: take one out first, with cache.extract(index)"
        )
    raise UnsupportedModel(
        f"kvq does not know the cache class {type(cache).__module__}.{name}, so it cannot store "
        "this model. Please report that name with the model and your mlx-lm version."
    )


def register(cache_class: type, adapter: Adapter) -> None:
    """Teach kvq one more cache class of keys and values."""
    _ADAPTERS[cache_class] = adapter
