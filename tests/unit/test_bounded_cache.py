"""Caches of limited length that always keep their first tokens: mlx-lm's `max_kv_size`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import zoo
from mlx_lm.models.cache import make_prompt_cache
from oracle import FOLLOWING, deviation, feed

from kvq.cache.leaves import describe
from kvq.cache.recorder import Recorder
from kvq.store import Store
from kvq.store.keys import as_ids
from kvq.store.space import Space
from kvq.store.writer import Writer


@pytest.mark.parametrize(
    ("tokens", "step", "limit"), [(60, 16, 24), (60, 16, 100), (600, 64, 40), (600, 64, 300)]
)
def test_first_and_newest_rows_come_back(tokens, step, limit, tmp_path) -> None:
    architecture = zoo.by_name("qwen3")
    model = architecture.build()
    ids = zoo.prompt(architecture, tokens + FOLLOWING)
    ends = [*range(step, tokens - 1, step), tokens - 1, tokens]
    store = Store.create(tmp_path / "store")
    _record(store, model, ids[:tokens], ends, limit)

    uninterrupted = make_prompt_cache(model, max_kv_size=limit)
    after = [tokens + 1, tokens + 2, tokens + 5, tokens + FOLLOWING]
    feed(model, uninterrupted, ids, 0, ends)
    expected = feed(model, uninterrupted, ids, tokens, after)
    # What a chunk of such a cache sees depends on its length, so only its ends compare.
    for cut in ends:
        caches = store.match("bounded", ids[:tokens]).load(model, upto=cut)
        assert {(cache.max_size, cache.keep) for cache in caches} == {(limit, 4)}
        rest = [*(end for end in ends if end > cut), *after]
        assert deviation(feed(model, caches, ids, cut, rest), expected) == 0.0, f"cut at {cut}"


def _record(store: Store, model, ids: list[int], ends: list[int], limit: int) -> None:
    probe = make_prompt_cache(model, max_kv_size=limit)
    feed(model, probe, ids, 0, [1])
    space = Space(
        fingerprint="bounded",
        dtype="float32",
        codec="raw",
        max_kv_size=limit,
        leaves=describe(probe),
    )
    writer = Writer(store)
    recorder = Recorder(
        space=space,
        folder=store.add_space(space),
        ids=as_ids(ids),
        kept=[len(ids)],
        writer=writer,
        all_windows=True,
    )
    caches = make_prompt_cache(model, max_kv_size=limit)
    start = 0
    for end in ends:
        logits = model(mx.array(ids[start:end])[None], cache=caches)[0]
        recorder.capture(caches, end)
        if end == len(ids):
            recorder.keep_logits(logits[-1])
        mx.eval([cache.state for cache in caches], recorder.arrays())
        recorder.hand_over(recorder.take())
        start = end
    writer.finish()
    writer.close()
    stored = store.match("bounded", np.array(ids, dtype=np.uint32))
    assert stored.exact
