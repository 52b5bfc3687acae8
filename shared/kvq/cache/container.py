"""A prompt cache that can be handed around while its layers are exchanged for quantized ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, SupportsIndex

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvq.cache.live import LayerReport, LiveQuantizer
from kvq.codec import GROUP_SIZES, resolve_group_size
from kvq.store.reason import Reason


class KVCacheContainer(list[Any]):
    """The caches of a model's layers: a list, so that mlx-lm takes it as a prompt cache.

    Whoever holds the container sees a layer's conversion, for it happens in this very list.

    tokens  how many tokens the caches cover, where known; kept up by TokenIterator
    logits  [vocab] logits after the last of these tokens, with which generation can start at
            once; None once more tokens have been fed
    model   whose caches these are; without it no layer is quantized, because whether its
            attention can run so is found by trying
    reason  where the caches were loaded from a store, why no more tokens were; else None
    """

    def __init__(
        self,
        caches: Iterable[Any] = (),
        tokens: int = 0,
        logits: mx.array | None = None,
        *,
        model: Any = None,
    ) -> None:
        super().__init__(caches)
        self.tokens = tokens
        self.logits = logits
        #: Why a restored container covers no more tokens (kvq.store.reason.Reason).
        self.reason: Reason | None = None
        self._live = LiveQuantizer(model)

    @classmethod
    def make(cls, model: Any, max_kv_size: int | None = None) -> KVCacheContainer:
        """Empty caches for `model`.

        `max_kv_size` bounds the tokens held, as in mlx-lm: only models that do not choose their
        own caches heed it.
        """
        return cls(make_prompt_cache(model, max_kv_size=max_kv_size), model=model)

    @property
    def model(self) -> Any:
        return self._live.model

    def bind(self, model: Any) -> KVCacheContainer:
        """Say whose caches these are, if that was not known before; the container itself."""
        if self._live.model is None:
            self._live.model = model
        return self

    def advance(self, tokens: int) -> None:
        """Note that `tokens` more tokens were fed; the stored logits no longer hold."""
        self.tokens += tokens
        self.logits = None

    def maybe_quantize(
        self, bits: int | None = 8, group_size: int = 64, quantized_kv_start: int = 0
    ) -> tuple[LayerReport, ...]:
        """Quantize every layer that can be and holds at least `quantized_kv_start` tokens.

        Each layer is converted once, in place for every holder of the container, with the group
        size nearest to `group_size` that divides its head dims; the others stay as they are, and
        the report says why. Meant to be called after every step: when nothing is left to do, it
        costs one comparison. With `bits` None it does nothing. Never raises because of a model;
        UsageError for a width or group size that MLX does not have.
        """
        if bits is None:
            return self._live.report
        return self._live.step(self, bits=bits, group_size=group_size, start=quantized_kv_start)

    @property
    def report(self) -> tuple[LayerReport, ...]:
        """One row a cache, as of the last `maybe_quantize`; empty before the first."""
        return self._live.report

    def can_quantize(self, at: int = 0) -> bool:
        """Is there a layer that `maybe_quantize` with `quantized_kv_start=at` would still convert?

        By class and tokens held; whether the model's attention allows it is known once tried.
        """
        return self._live.convertible(self, max(at, 1))

    @staticmethod
    def is_valid_group_size(group_size: int, *dims: int) -> bool:
        """Does MLX have this group size, and does it divide all `dims`?"""
        return group_size in GROUP_SIZES and all(d > 0 and d % group_size == 0 for d in dims)

    @staticmethod
    def resolve_group_size(*dims: int, preferred: int = 64) -> int | None:
        """The group size nearest to `preferred` that divides all `dims`; the smaller on a tie."""
        return resolve_group_size(*dims, preferred=preferred)

    @property
    def nbytes(self) -> int:
        """Bytes that the caches take in memory, unused rows included."""
        return sum(int(cache.nbytes) for cache in self)

    def __setitem__(self, index: SupportsIndex | slice, value: Any) -> None:
        super().__setitem__(index, value)
        self._live.forget()

    def __copy__(self) -> KVCacheContainer:
        return self._like(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCacheContainer:
        """A container that shares the model, and nothing that generation changes."""
        return self._like(copy.deepcopy(cache, memo) for cache in self)

    def _like(self, caches: Iterable[Any]) -> KVCacheContainer:
        container = KVCacheContainer(caches, self.tokens, self.logits, model=self.model)
        container.reason = self.reason
        return container
