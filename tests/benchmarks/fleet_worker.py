"""The worker of `fleet`: kvq's own, with a stand-in for the model that takes a model's time.

It prefills a little before it listens, so that its start is not measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from benchmarks.restore import loaded
from kvq.prefill import Prefiller
from kvq.store import Store
from kvq_worker import ResidentWorker
from kvq_worker.models import Models

#: The variable that says how many tokens a second the model computes.
RATE = "FLEET_RATE"
_SIZE = 32


class Sleeper:
    """A model of one layer that sleeps for its tokens, `rate` a second.

    A token's key repeats its id, its value its position: float32 rows of 32 numbers.
    """

    layers = (None,)

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def __call__(self, ids: mx.array, cache: Sequence[Any]) -> mx.array:
        """Zeros for logits, [1, n, 32] for `ids` [1, n]."""
        count, start = ids.shape[1], cache[0].offset
        time.sleep(count / self._rate)
        shape = (1, 1, count, _SIZE)
        keys = mx.broadcast_to(ids.reshape(1, 1, -1, 1), shape).astype(mx.float32)
        places = mx.arange(start, start + count).reshape(1, 1, -1, 1)
        cache[0].update_and_fetch(keys, mx.broadcast_to(places, shape).astype(mx.float32))
        return mx.zeros((1, count, _SIZE))


class SleepingModels(Models):
    """Has a Sleeper for every model."""

    def _prefiller(self, store: Store, model: str, adapter: str | None) -> Prefiller:
        place: Any = (model, store.path)
        if place not in self._prefillers:
            sleeper = loaded(Sleeper(float(os.environ[RATE])))
            self._prefillers[place] = Prefiller(store, sleeper, step=self._settings.step)
        return self._prefillers[place]


class FleetWorker(ResidentWorker):
    """ResidentWorker with SleepingModels, warm from the start."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.models = SleepingModels(self.settings)
        with tempfile.TemporaryDirectory() as folder:
            self.models.run(
                Store.create(Path(folder) / "store"),
                "warm",
                None,
                on_chunk=lambda done, total: None,
                token_ids=list(range(64)),
                name="warm",
                codec="raw",
            )
