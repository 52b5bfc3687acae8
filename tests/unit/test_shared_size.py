"""What sharing saves on the disk: 100 prompts of 4,096 tokens that share nine tenths of them."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from benchmarks.measure import folder_bytes
from benchmarks.restore import loaded
from benchmarks.shapes import CacheOnly, Shape
from mlx_lm.models.cache import save_prompt_cache

from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store

PROMPTS, TOKENS, SHARED = 100, 4096, 3686


def test_prompts_that_share_nine_tenths_take_a_sixth_of_stock_files(tmp_path: Path) -> None:
    model = CacheOnly(Shape(layers=4, kv_heads=1, head_dim=64))
    random = np.random.default_rng(0)
    shared = random.integers(0, 30000, SHARED)
    store = Store.create(tmp_path / "store")
    prefiller = Prefiller(store, loaded(model), step=2048)
    prefiller.run(PrefillRequest(token_ids=shared.astype(np.uint32), name=None, codec="raw"))
    for number in range(PROMPTS):
        own = random.integers(0, 30000, TOKENS - SHARED)
        ids = np.concatenate([shared, own]).astype(np.uint32)
        prefiller.run(PrefillRequest(token_ids=ids, name=f"p{number}", codec="raw"))

    stock = tmp_path / "stock.safetensors"
    caches = model.make_cache()
    model(mx.zeros((1, TOKENS), mx.uint32), cache=caches)
    save_prompt_cache(str(stock), caches)
    # Rows alone would be 7.5 times fewer: 409,600 a layer, or 54,784 with the blocks of each part.
    assert 7 < PROMPTS * stock.stat().st_size / folder_bytes(store.path) < 7.5
