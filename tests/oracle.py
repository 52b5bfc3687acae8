"""The yardstick for everything that restores a cache: a run of the same model never interrupted.

A `Bench` stores one prompt of a zoo model with the Prefiller and knows the logits that an
uninterrupted run, fed in the same chunks, has after the prompt and after what follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import CacheList, make_prompt_cache
from zoo import Architecture, prompt

from kvq.model.folder import ModelFacts
from kvq.model.loading import LoadedModel, weight_bytes
from kvq.prefill import Prefiller, PrefillOutcome, PrefillRequest
from kvq.store import Match, Store

#: What two runs whose chunks fall differently may differ by, relative to the largest logit.
ROUNDING = 1e-4
#: Tokens that follow a stored prompt: some one by one, as generation feeds them, and one chunk.
FOLLOWING = 8
#: Tokens in a chunk of a short prompt.
STEP = 16

Logits = npt.NDArray[np.float32]


def as_loaded(architecture: Architecture, model: Any = None) -> LoadedModel:
    """A zoo model as the library has a loaded one, without folder and tokenizer."""
    model = model or architecture.build()
    return LoadedModel(
        name=architecture.name,
        folder=Path(),
        fingerprint=f"zoo-{architecture.name}",
        facts=ModelFacts(
            model_type=architecture.module, context_tokens=None, vocab_size=architecture.vocabulary
        ),
        nbytes=weight_bytes(model),
        model=model,
        tokenizer=None,
    )


def feed(
    model: Any, caches: Sequence[Any], ids: Sequence[int], start: int, ends: Sequence[int]
) -> Logits:
    """Logits after the last of `ends`, feeding from `start` on in chunks that end there."""
    logits = None
    for end in ends:
        logits = model(mx.array(ids[start:end])[None], cache=caches)
        mx.eval(logits, [cache.state for cache in leaves(caches)])
        start = end
    assert logits is not None
    return np.array(logits[0, -1].astype(mx.float32))


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches inside nested lists."""
    found = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def deviation(got: Logits, expected: Logits) -> float:
    """Largest difference, relative to the largest logit; 0.0 only when all bits agree."""
    if np.array_equal(got, expected):
        return 0.0
    difference = float(np.abs(got - expected).max() / np.abs(expected).max())
    return difference or np.finfo(np.float32).tiny


class Bench:
    """One prompt of `tokens` tokens, stored with codec raw, and the run to compare with."""

    def __init__(
        self,
        architecture: Architecture,
        folder: Path,
        *,
        tokens: int,
        step: int,
        keep: tuple[int, ...] = (),
        window_records: str = "kept",
        llm: LoadedModel | None = None,
    ) -> None:
        self.architecture = architecture
        self.tokens = tokens
        self.ids = prompt(architecture, tokens + FOLLOWING)
        self._deviations: dict[int, float] = {}
        self.llm = llm or as_loaded(architecture)
        self.model = self.llm.model
        self.store = Store.create(folder / "store")
        #: Where the chunks of the prompt ended (tokens).
        self.ends = self.prefill(self.ids[:tokens], step, keep, window_records)[1]
        self.after = [tokens + more for more in (1, 2, 5, 6, 7, FOLLOWING)]
        caches = make_prompt_cache(self.model)
        self.at_end = feed(self.model, caches, self.ids, 0, self.ends)
        self.expected = feed(self.model, caches, self.ids, tokens, self.after)

    def prefill(
        self,
        ids: Sequence[int],
        step: int,
        keep: tuple[int, ...] = (),
        window_records: str = "kept",
    ) -> tuple[PrefillOutcome, list[int]]:
        """Store `ids`; what that did, and the positions at which its chunks ended."""
        ends: list[int] = []

        def on_chunk(done: int, total: int) -> None:
            ends.append(done)

        request = PrefillRequest(
            token_ids=np.array(ids, dtype=np.uint32),
            name="prompt",
            codec="raw",
            keep=keep,
            window_records=window_records,
        )
        outcome = Prefiller(self.store, self.llm, step=step).run(request, on_chunk=on_chunk)
        return outcome, ends[1:]

    def match(self, ids: Sequence[int] | None = None) -> Match:
        """The match of `ids`, by default of the stored prompt."""
        return self.store.match(
            self.llm.fingerprint, self.ids[: self.tokens] if ids is None else ids
        )

    def go_on(self, caches: Sequence[Any], position: int) -> Logits:
        """The logits at the very end, from caches that cover `position` tokens."""
        ends = [end for end in self.ends if end > position]
        return feed(self.model, caches, self.ids, position, [*ends, *self.after])

    def deviation_at(self, cut: int) -> float:
        """How far a run resumed at `cut` is from the one never interrupted."""
        if cut not in self._deviations:
            caches = self.match().load(self.model, upto=cut)
            assert caches.tokens == cut
            self._deviations[cut] = deviation(self.go_on(caches, cut), self.expected)
        return self._deviations[cut]

    def limit_at(self, cut: int) -> float:
        """What `deviation_at(cut)` may be: nothing where the chunks fall alike."""
        return 0.0 if cut in self.ends else ROUNDING


def short_bench(architecture: Architecture, folder: Path) -> Bench:
    """A prompt within one block, longer than three windows; states are kept at four positions."""
    keep = (5, STEP, STEP + 7) if "state" in architecture.kinds else ()
    tokens = max(2 * STEP + 9, 3 * (architecture.window or 8))
    return Bench(architecture, folder, tokens=tokens, step=STEP, keep=keep)


def cuts(bench: Bench) -> list[int]:
    """Kept positions of a recurrent model; else every kind of cut, also where windows wrap."""
    n, window = bench.tokens, bench.architecture.window
    if "state" in bench.architecture.kinds:
        return [5, STEP, STEP + 7, n]
    places = {1, STEP - 1, STEP, STEP + 1, n - 2, n - 1, n}
    if window:
        places |= {window - 1, window, window + 1, 2 * window + 1}
    if not bench.architecture.chunk_free:
        places &= set(bench.ends)
    return sorted(places)
