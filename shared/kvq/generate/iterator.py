"""Tokens from a model, one at a time, going on from any prompt cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from kvq.cache.container import KVCacheContainer
from kvq.cache.live import LiveQuantizer
from kvq.errors import UsageError
from kvq.generate.parameters import GenerateParameters

#: Tokens after which MLX's pool of freed buffers is emptied.
_CLEAR_EVERY = 256


class TokenIterator(Iterator[int]):
    """Yields the tokens that `model` generates after a prompt.

    prompt_ids    the token ids still to be fed: all of them, or those that `cache` lacks. May be
                  empty where the logits after the last cached token are known.
    cache         a KVCacheContainer, or mlx-lm's list of caches; extended in place. None: a new one
    parameters    how to generate
    prior_ids     the ids of the tokens that `cache` covers already, for logits processors
    first_logits  [vocab], the logits after the last cached token: with no `prompt_ids`, the first
                  token is sampled from them and needs no forward pass. None: `cache.logits`
    progress      called with (prompt tokens fed, prompt tokens in all) before, between and after
                  chunks; what it raises ends the prefill and leaves `cache` with whole chunks

    The prompt is fed when the iterator is made: all but its last token in chunks, then the last
    alone, as mlx-lm does, so that greedy tokens are the same. From then on the model is always
    fed one token ahead of the caller: while a token is being looked at, the next is computed (the
    second only when it is asked for, so that the first comes at once). So whenever the caller
    stops, the cache covers the prompt and exactly the tokens that were yielded, the last one
    included, and a conversation goes on from there.

    An iterator belongs to the thread that made it, like the arrays of MLX.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int] | np.ndarray[Any, Any] | mx.array,
        model: Any,
        cache: KVCacheContainer | list[Any] | None = None,
        parameters: GenerateParameters | None = None,
        *,
        prior_ids: Sequence[int] | np.ndarray[Any, Any] | mx.array | None = None,
        first_logits: mx.array | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        started = time.perf_counter()
        self.parameters = parameters if parameters is not None else GenerateParameters()
        self.model = model
        if cache is None:
            cache = KVCacheContainer.make(model, self.parameters.max_kv_size)
        self.cache: KVCacheContainer | list[Any] = cache
        self.logprobs: mx.array | None = None
        self.token_count = 0
        if isinstance(cache, KVCacheContainer):
            cache.bind(model)
        else:
            self._live = LiveQuantizer(model)
        self._sampler = self.parameters.make_sampler()
        self._processors = self.parameters.make_logits_processors()
        self._seen = _ids([] if prior_ids is None else prior_ids)
        prompt = _ids(prompt_ids)
        with mx.stream(generation_stream):
            self._next = self._prefill(prompt, first_logits, progress or (lambda *_: None))
        mx.async_eval(self._next)  # type: ignore[no-untyped-call]
        self._prefill_seconds = time.perf_counter() - started

    @property
    def prompt_prefill_seconds(self) -> float:
        """Seconds spent here until the first token was known; until then, those spent so far."""
        return self._prefill_seconds

    def __next__(self) -> int:
        limit = self.parameters.max_tokens
        if limit is not None and self.token_count >= limit:
            raise StopIteration
        started = time.perf_counter()
        token, self.logprobs = self._next
        first = self.token_count == 0
        if first:
            mx.eval(token)
            self._prefill_seconds += time.perf_counter() - started
        elif self.token_count == 1:
            mx.async_eval(self._next)  # type: ignore[no-untyped-call]
        with mx.stream(generation_stream):
            self._next = self._step(token)
        if not first:
            # Nobody waits for the second token yet: the first must not wait for its computation,
            # much of which MLX finishes before it returns from here.
            mx.async_eval(self._next)  # type: ignore[no-untyped-call]
        value = cast(int, token.item())
        if self.token_count % _CLEAR_EVERY == 0:
            mx.clear_cache()
        self.token_count += 1
        return value

    def _prefill(
        self,
        prompt: mx.array,
        first_logits: mx.array | None,
        progress: Callable[[int, int], None],
    ) -> tuple[mx.array, mx.array]:
        """Feed the prompt; the first token [1] and its log-probabilities [vocab], lazy."""
        total = prompt.size
        progress(0, total)
        if total == 0:
            return self._sample(self._stored_logits(first_logits))
        done = 0
        while total - done > 1:
            count = min(self.parameters.prefill_step_size, total - done - 1)
            chunk = prompt[done : done + count]
            self._feed(chunk)
            self._quantize()
            mx.eval([cache.state for cache in self.cache])
            mx.clear_cache()
            done += count
            progress(done, total)
        first = self._step(prompt[done:])
        progress(total, total)
        return first

    def _step(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """Feed `ids` and sample the token after them."""
        logits = self._feed(ids)
        sampled = self._sample(logits)
        self._quantize()
        return sampled

    def _feed(self, ids: mx.array) -> mx.array:
        """Logits [1, vocab] after the last of `ids` [n], which the cache then covers."""
        logits: mx.array = self.model(ids[None], cache=self.cache)[:, -1, :]
        if self._processors:
            self._seen = mx.concatenate([self._seen, ids])
        if isinstance(self.cache, KVCacheContainer):
            self.cache.advance(ids.size)
        return logits

    def _sample(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        for processor in self._processors:
            logits = processor(self._seen, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return self._sampler(logprobs).astype(mx.uint32), logprobs.squeeze(0)

    def _quantize(self) -> None:
        bits, size = self.parameters.kv_bits, self.parameters.kv_group_size
        start = self.parameters.quantized_kv_start
        if bits is None:
            return
        if isinstance(self.cache, KVCacheContainer):
            self.cache.maybe_quantize(bits, size, start)
        else:
            self._live.step(self.cache, bits=bits, group_size=size, start=start)

    def _stored_logits(self, first_logits: mx.array | None) -> mx.array:
        if first_logits is None and isinstance(self.cache, KVCacheContainer):
            first_logits = self.cache.logits
        if first_logits is None:
            raise UsageError(
                "there is no token to feed, and the logits after the last cached token are not "
                "known. Trim the cache by one token and pass that token as the prompt."
            )
        return first_logits.reshape(1, -1)


def _ids(ids: Sequence[int] | np.ndarray[Any, Any] | mx.array) -> mx.array:
    """Token ids as a uint32 array [n]."""
    if isinstance(ids, mx.array):
        return ids.reshape(-1).astype(mx.uint32)
    return mx.array(np.asarray(ids, dtype=np.uint32).reshape(-1))
