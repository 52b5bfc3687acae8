"""Trying quantized caches on a model: does it run, is it right, does it run on a long context?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from kvq.cache.convert import Path, at, blank, group_size_of, put, quantized, refusal
from kvq.cache.leaves import iter_leaves
from kvq.errors import CannotQuantize

#: Tokens before the conversion, then a chunk and a single token after it: the ways in which a
#: model builds its masks. A window of eight wraps.
_BEFORE, _AFTER = 5, (3, 1)

#: Some attention changes with length (sparse above a number of tokens, say). Never evaluated.
_LONG = 16_384

#: How far logits over codes may be from logits over the same values in plain arrays, relative in
#: the Euclidean norm. Right ones differ by 1e-6 in float32 and up to 0.05 in the half types; a
#: tiny model that scales its queries twice, by 0.11.
_TOLERANCE = {mx.float32: 0.01}
_HALF_TOLERANCE = 0.1

#: How MLX's binding ends the first line of its type errors.
_NANOBIND = " The following argument types are supported:"


class Trial:
    """Small caches of a model, and what happens when some of them are quantized.

    `error` is what goes wrong with all of them exact, or "". `unfit` are those that have no
    quantized form at all, with the reason; `sizes` the group sizes of the others.
    """

    def __init__(self, model: Any, caches: Sequence[Any], *, bits: int, group_size: int) -> None:
        self.unfit: dict[Path, str] = {}
        self.sizes: dict[Path, int] = {}
        self._model = model
        self._bits = bits
        self._caches = [blank(cache) for cache in caches]
        self.error, _ = self._feed(self._caches, _BEFORE)
        if self.error:
            return
        for path, cache in iter_leaves(self._caches):
            reason = refusal(cache)
            if reason or cache.keys is None:
                self.unfit[path] = reason or "the model never fills it"
                continue
            try:
                self.sizes[path] = group_size_of(cache, group_size)
            except CannotQuantize as error:
                self.unfit[path] = str(error)
        self._long = [lengthened(cache, _LONG) for cache in copy.deepcopy(self._caches)]
        if self._feed(copy.deepcopy(self._long), 1, evaluate=False)[0]:
            self._long = []

    def error_of(self, paths: Sequence[Path]) -> str:
        """What goes wrong when the caches at `paths` are quantized, or ""."""
        caches = self._converted(self._caches, paths, quantized)
        plain = self._converted(self._caches, paths, rounded)
        for tokens in _AFTER:
            error, logits = self._feed(caches, tokens)
            if not error:
                error, expected = self._feed(plain, tokens)
            if error:
                return error
            if far := _distance(logits, expected):
                return f"its logits are off by {far:.0%} from those over the same values"
        if self._long:
            caches = self._converted(self._long, paths, quantized)
            for tokens in _AFTER:
                error, _ = self._feed(caches, tokens, evaluate=False)
                if error:
                    return f"after {_LONG} tokens, {error}"
        return ""

    def _converted(
        self, caches: list[Any], paths: Sequence[Path], form: Callable[..., Any]
    ) -> list[Any]:
        caches = copy.deepcopy(caches)
        for path in paths:
            cache = at(caches, path)
            put(caches, path, form(cache, bits=self._bits, group_size=self.sizes[path]))
        return caches

    def _feed(
        self, caches: list[Any], tokens: int, *, evaluate: bool = True
    ) -> tuple[str, mx.array]:
        """Run `tokens` tokens; what went wrong, or "" and the logits [1, vocab] of the last."""
        try:
            logits = self._model(mx.arange(tokens)[None], cache=caches)[:, -1]
            if evaluate:
                mx.eval(logits, [cache.state for cache in caches])
        except Exception as error:  # whatever some model's own code raises is the answer
            first_line = str(error).strip().partition("\n")[0]
            return f"{type(error).__name__}: {first_line.removesuffix(_NANOBIND)}", mx.array([])
        return "", logits


def lengthened(cache: Any, tokens: int) -> Any:
    """`cache`, changed to hold lazy zeros for `tokens` tokens; a recurrent state as it is."""
    if isinstance(cache, CacheList):
        for part in cache.caches:
            lengthened(part, tokens)
        return cache
    if getattr(cache, "keys", None) is None:
        return cache
    rows = tokens
    if type(cache) is RotatingKVCache:
        rows = cache._idx = min(tokens, cache.max_size)
    elif type(cache) is ChunkedKVCache:
        rows = min(tokens, cache.chunk_size)
        cache.start_position = tokens - rows
    cache.keys, cache.values = (
        mx.zeros((*x.shape[:2], rows, x.shape[3]), dtype=x.dtype)
        for x in (cache.keys, cache.values)
    )
    cache.offset = tokens
    return cache


def rounded(cache: Any, *, bits: int, group_size: int) -> Any:
    """`cache` in plain arrays that hold, now and later, what its quantized form gives back."""
    plain = (_RoundedWindow if type(cache) is RotatingKVCache else _Rounded).from_state(cache.state)
    plain.how = {"bits": bits, "group_size": group_size}
    if cache.keys is not None:
        plain.keys, plain.values = (_round(x, plain.how) for x in (cache.keys, cache.values))
    return plain


class _Rounded(KVCache):  # type: ignore[misc]
    how: Mapping[str, int]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(_round(keys, self.how), _round(values, self.how))


class _RoundedWindow(RotatingKVCache):  # type: ignore[misc]
    how: Mapping[str, int]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(_round(keys, self.how), _round(values, self.how))


def _round(x: mx.array, how: Mapping[str, int]) -> mx.array:
    bits, size = how["bits"], how["group_size"]
    codes = mx.quantize(x, group_size=size, bits=bits)
    return mx.dequantize(*codes, group_size=size, bits=bits)


def _distance(logits: mx.array, expected: mx.array) -> float:
    """How far `logits` are from `expected`, relative; 0 when that is within the tolerance."""
    tolerance = _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE)
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    spread = mx.linalg.norm(expected - expected.mean())
    far = cast(float, (mx.linalg.norm(logits - expected) / spread).item())
    return 0.0 if far <= tolerance else far
