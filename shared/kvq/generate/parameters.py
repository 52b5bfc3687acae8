"""How to generate: sampling, limits and live quantization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from kvq.errors import UsageError

#: Token [1] from log-probabilities [1, vocab].
Sampler = Callable[[mx.array], mx.array]
#: New logits [1, vocab] from all tokens so far [n] and logits [1, vocab].
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, kw_only=True)
class GenerateParameters:
    """Settings of a TokenIterator.

    max_tokens          tokens to yield; None for no limit
    temperature, top_p, top_k, min_p
                        sampling as in mlx-lm; a temperature of 0 takes the likeliest token
    sampler             instead of these four
    repetition_penalty  divides the logits of the last `repetition_context_size` tokens; None: off
    logits_processors   applied in order, after the penalty
    prefill_step_size   prompt tokens a chunk
    max_kv_size         tokens held, for models that do not choose their own caches (None: all);
                        heeded only where the iterator makes the cache
    kv_bits             quantize the layers that can be, live (None: do not), in groups of
                        `kv_group_size` or the nearest size that fits, once they hold
                        `quantized_kv_start` tokens
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    sampler: Sampler | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    logits_processors: tuple[LogitsProcessor, ...] = ()
    prefill_step_size: int = 512
    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise UsageError(f"max_tokens is {self.max_tokens}; use None for no limit")
        if self.prefill_step_size < 1:
            raise UsageError(f"prefill_step_size is {self.prefill_step_size}, less than 1")
        if self.temperature < 0:
            raise UsageError(f"temperature is {self.temperature}, below 0")

    def make_sampler(self) -> Sampler:
        """The sampler that these parameters describe."""
        if self.sampler is not None:
            return self.sampler
        made: Sampler = make_sampler(
            temp=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p
        )
        return made

    def make_logits_processors(self) -> tuple[LogitsProcessor, ...]:
        """The logits processors that these parameters describe, in order."""
        penalty = make_logits_processors(
            repetition_penalty=self.repetition_penalty,
            repetition_context_size=self.repetition_context_size,
        )
        return (*penalty, *self.logits_processors)
