"""The spaces of one loaded model: one for each codec."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvq import codec as codecs
from kvq.cache.leaves import check_supported, describe
from kvq.model.loading import LoadedModel
from kvq.store.space import Leaf, Space


class ModelSpaces:
    """Finds out once what the model's layers keep, by feeding it one token."""

    def __init__(self, llm: LoadedModel) -> None:
        self._llm = llm
        self._leaves: tuple[Leaf, ...] | None = None

    def of(self, codec: str) -> Space:
        """The space of this model's caches with `codec`. Raises UnsupportedModel, UsageError."""
        chosen = codecs.get(codec)
        if self._leaves is None:
            self._leaves = self._probe()
        dtypes = [leaf.keys_dtype for leaf in self._leaves if leaf.keys_dtype]
        return Space(
            fingerprint=self._llm.fingerprint,
            dtype=dtypes[0] if dtypes else "none",
            codec=chosen.name,
            codec_parameters=chosen.parameters,
            leaves=self._leaves,
        )

    def _probe(self) -> tuple[Leaf, ...]:
        caches = make_prompt_cache(self._llm.model)
        check_supported(caches)
        self._llm.model(mx.zeros((1, 1), mx.uint32), cache=caches)
        mx.eval([cache.state for cache in caches])
        return describe(caches)
