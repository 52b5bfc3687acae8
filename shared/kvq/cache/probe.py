"""Which layers of a model can attend to quantized keys and values: tried, not guessed.

Conversion always succeeds; it is the next forward pass that fails, where an attention has sinks,
absorbs its projections into the latents, is written out by hand, or lends its keys to other
layers; or that is wrong without failing. So a few tokens are run through small caches of the same
classes, made for the purpose, and the layers at fault are found by halving.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvq.cache.convert import Path
from kvq.cache.leaves import iter_leaves
from kvq.cache.trial import Trial

_Answer = Mapping[Path, str]
_answers: dict[int, dict[tuple[Any, ...], _Answer]] = {}


def unfit_layers(model: Any, caches: Sequence[Any], *, bits: int, group_size: int) -> _Answer:
    """Every leaf of `caches` that cannot run quantized with `model`, and why not.

    `caches` are looked at for their classes only and do not change. Remembered for as long as
    the model lives.
    """
    shape = (tuple(_signature(caches)), bits, group_size)
    if id(model) not in _answers:
        _answers[id(model)] = {}
        weakref.finalize(model, _answers.pop, id(model), None)
    known = _answers[id(model)]
    if shape not in known:
        known[shape] = _probe(model, caches, bits, group_size)
    return known[shape]


def _probe(model: Any, caches: Sequence[Any], bits: int, group_size: int) -> _Answer:
    trial = Trial(model, caches, bits=bits, group_size=group_size)
    if trial.error:
        return {
            path: f"the model failed on exact caches: {trial.error}"
            for path, _ in iter_leaves(caches)
        }
    # Layers of one class tend to fail together, so they stand together where the list is halved.
    kinds = {path: type(cache).__name__ for path, cache in iter_leaves(caches)}
    candidates = sorted(trial.sizes, key=lambda path: (kinds[path], path))
    failing = _isolate(trial.error_of, candidates)
    fit = [path for path in candidates if path not in failing]
    if failing and (together := trial.error_of(fit)):  # each would do, but not side by side
        failing |= dict.fromkeys(fit, together)
    return trial.unfit | {
        path: f"the model's attention cannot read quantized keys: {reason}"
        for path, reason in failing.items()
    }


def _isolate(attempt: Callable[[Sequence[Path]], str], paths: Sequence[Path]) -> dict[Path, str]:
    """The paths that fail, found by halving: one attempt where all of them do."""
    error = attempt(paths) if paths else ""
    if not error:
        return {}
    if len(paths) == 1:
        return {paths[0]: error}
    half = len(paths) // 2
    return _isolate(attempt, paths[:half]) | _isolate(attempt, paths[half:])


def _signature(caches: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What of the caches the answer depends on; the same before and after a conversion."""
    limits = ("max_size", "keep", "chunk_size")
    return [
        (
            path,
            type(cache).__name__.removeprefix("Quantized"),
            *(getattr(cache, name, None) for name in limits),
        )
        for path, cache in iter_leaves(caches)
    ]
