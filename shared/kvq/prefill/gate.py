"""The gate: how much a codec changes what the model says next, measured on each cache itself.

The prompt's last tokens are replayed on rows that went through the codec, and the predictions are
compared with the exact ones: mean and max KL divergence, top-1 agreement (`kvq.codec.quality`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from kvq import codec as codecs
from kvq.cache.refill import through
from kvq.cache.rewind import Rewind
from kvq.codec.quality import Quality, measure
from kvq.store.keys import TokenIds
from kvq.store.space import Leaf

#: At most so many tokens are replayed, and at most a quarter of the prompt. On a small model with a
#: large vocabulary each costs about three tokens of prefill: 64 were 5 % of 4,096 there. With 48
#: the mean's standard error is 15 % larger than with 64.
REPLAY_TOKENS = 48
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


def limit_of(codec: str, max_kl: float | None) -> float | None:
    """The mean KL divergence (nats) up to which a codec passes; None where all do."""
    if not is_gated(codec, max_kl):
        return None
    return DEFAULT_MAX_KL if max_kl is None else max_kl


def choose(measured: Mapping[str, Quality], codec: str, limit: float) -> str:
    """The smallest codec that was measured and passes; `raw` when none does."""
    for name in candidates(codec, limit):
        if name in measured and measured[name].mean_kl <= limit:
            return name
    return "raw"


class Gate:
    """Measures the codecs `names` on one prefill of `ids`, which starts at `begin` tokens.

    The smallest comes first; where `limit` (nats) is given, those after one that passes are not
    measured. `start` is where the replay begins: never before what is computed anyway. `leaves`
    are the model's, as its space describes them.
    """

    def __init__(
        self,
        model: Any,
        ids: TokenIds,
        names: Sequence[str],
        leaves: Sequence[Leaf],
        *,
        begin: int = 0,
        limit: float | None = None,
    ) -> None:
        self.start = max(begin, len(ids) - replay_tokens(len(ids)))
        self.measured: dict[str, Quality] = {}
        self._model = model
        self._tail = mx.array(ids[self.start :])[None]
        self._names = tuple(names) if 0 < self.start < len(ids) else ()
        self._limit = limit
        self._past = Rewind(leaves, self.start)
        self._exact: list[mx.array] = []
        self._lossy: mx.array | None = None

    @property
    def stops(self) -> tuple[int, ...]:
        """Positions at which a chunk has to end: where the replay begins, if there is one."""
        return (self.start,) if self._names else ()

    def begin(self, caches: Sequence[Any], position: int) -> None:
        """Look at the caches before the first chunk, at `position` tokens."""
        if self._names:
            self._past.watch(caches, position)

    def listen(self, caches: Sequence[Any], logits: mx.array, end: int) -> list[mx.array]:
        """Look at the caches after a chunk that ends at `end`, and at its logits [n, vocab].

        Returns what has to be evaluated with the chunk.
        """
        if not self._names:
            return []
        self._past.watch(caches, end)
        if end <= self.start:
            return self._past.arrays()
        self._exact.append(logits)
        return [*self._past.arrays(), logits]

    def prepare(self, caches: Sequence[Any]) -> list[mx.array]:
        """Describe the replay of the first codec; the last chunk need not be evaluated yet.

        Returns what `replay` will wait for, so that the device can begin with it.
        """
        if not self._exact:
            return []
        self._lossy = self._logits(caches, self._names[0])
        return [self._lossy]

    def replay(self, caches: Sequence[Any]) -> None:
        """After the last chunk: fill `measured`, with what a resume at `start` would predict."""
        if not self._exact:
            return
        exact = mx.concatenate(self._exact, axis=0)
        for name in self._names:
            lossy, self._lossy = self._lossy, None
            if lossy is None:
                lossy = self._logits(caches, name)
            self.measured[name] = measure(exact, lossy)
            if self._limit is not None and self.measured[name].mean_kl <= self._limit:
                break
        self._exact.clear()

    def _logits(self, caches: Sequence[Any], name: str) -> mx.array:
        """Logits [n, vocab] of the tail after rows that went through the codec. Lazy."""
        lossy = self._past.caches(self._model, caches, through(codecs.get(name)))
        logits: mx.array = self._model(self._tail, cache=lossy)[0]
        return logits
