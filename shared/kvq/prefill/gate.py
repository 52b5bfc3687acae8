"""The gate: how much a codec changes what the model says next, measured on each cache itself.

The prompt's last tokens are replayed on rows that went through the codec, and the predictions are
compared with the exact ones: mean and max KL divergence, top-1 agreement (`kvq.codec.quality`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from kvq import codec as codecs
from kvq.cache.refill import refill, through
from kvq.codec.quality import Quality, measure
from kvq.store.keys import TokenIds

#: At most so many tokens are replayed, and at most a quarter of the prompt.
REPLAY_TOKENS = 64
#: The mean KL divergence (nats) that `auto` accepts unless it is told another.
DEFAULT_MAX_KL = 0.05


def replay_tokens(tokens: int) -> int:
    """How many of a prompt's last tokens are replayed."""
    return min(REPLAY_TOKENS, tokens // 4)


def is_gated(codec: str, max_kl: float | None) -> bool:
    """Whether a measurement decides the codec."""
    return codec == "auto" or max_kl is not None


def candidates(codec: str, max_kl: float | None) -> tuple[str, ...]:
    """The lossy codecs to measure, smallest first: those that the cache may end up with."""
    lossy = [name for name in reversed(codecs.names()) if not codecs.get(name).exact]
    if codec == "auto":
        return tuple(lossy)
    if codecs.get(codec).exact:
        return ()
    return tuple(lossy[lossy.index(codec) :]) if max_kl is not None else (codec,)


def accepted(codec: str, max_kl: float | None, *, default: str) -> tuple[str, ...]:
    """The codecs in which a stored cache answers the request, smallest first.

    `default` is what `auto` uses for shared prefixes, which are not measured.
    """
    if not is_gated(codec, max_kl):
        return (codec,)
    return tuple(dict.fromkeys((*candidates(codec, max_kl), default, "raw")))


def choose(measured: Mapping[str, Quality], codec: str, limit: float) -> str:
    """The smallest codec that was measured and passes; `raw` when none does."""
    for name in candidates(codec, limit):
        if name in measured and measured[name].mean_kl <= limit:
            return name
    return "raw"


class Gate:
    """Measures `names` (codecs) on one prefill that starts at `begin` tokens.

    `start` is the position at which the replay begins: never before what is computed anyway.
    """

    def __init__(self, model: Any, ids: TokenIds, names: Sequence[str], begin: int = 0) -> None:
        self.start = max(begin, len(ids) - replay_tokens(len(ids)))
        self._model = model
        self._ids = ids
        self._names = tuple(names) if self.start < len(ids) else ()
        self._lossy: dict[str, mx.array] = {}
        self._exact: list[mx.array] = []

    @property
    def stops(self) -> tuple[int, ...]:
        """Positions at which a chunk has to end: where the replay begins, if there is one."""
        return (self.start,) if self._names else ()

    def replay(self, caches: Sequence[Any], position: int) -> None:
        """At `start`, with exact caches: what the model says on rows that went through a codec."""
        if position != self.start or position == 0:
            return
        tail = mx.array(self._ids[self.start :])[None]
        for name in self._names:
            copies = refill(self._model, caches, position, through(codecs.get(name)))
            logits = self._model(tail, cache=copies)[0]
            mx.eval(logits)
            self._lossy[name] = logits

    def listen(self, logits: mx.array, end: int) -> list[mx.array]:
        """Take the exact logits [n, vocab] of a chunk that ends at `end`, if it is replayed.

        Returns what has to be evaluated with the chunk.
        """
        if end <= self.start or not self._lossy:
            return []
        self._exact.append(logits)
        return [logits]

    def measured(self) -> dict[str, Quality]:
        """The quality of each codec, by name; nothing where there was nothing to replay."""
        if not self._exact:
            return {}
        exact = mx.concatenate(self._exact, axis=0)
        return {name: measure(exact, lossy) for name, lossy in self._lossy.items()}
