"""Caches of some tokens ago, and rows that went through a codec."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import zoo
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from kvq import codec as codecs
from kvq.cache.leaves import describe
from kvq.cache.refill import through, unchanged
from kvq.cache.rewind import Rewind
from kvq.codec import SINK_TOKENS
from kvq.store.keys import BLOCK

TOKENS, START = 600, 530


def built(name: str) -> tuple[Any, list[int]]:
    """A model and a prompt; `name` may end in the tokens that its caches are bounded to."""
    architecture = zoo.by_name(name.split("@")[0])
    model = architecture.build()
    if "@" in name:
        limit = int(name.split("@")[1])
        layers = len(model.layers)
        model.make_cache = lambda: [RotatingKVCache(limit, keep=4) for _ in range(layers)]
    return model, zoo.prompt(architecture, TOKENS)


@pytest.mark.parametrize("step", [64, 300])
@pytest.mark.parametrize(
    "name",
    [
        *("llama-64", "gemma3_text", "llama4", "deepseek_v3", "falcon_h1", "qwen3_next"),
        *("qwen3@40", "qwen3@300", "qwen3@1000"),
    ],
)
def test_what_follows_is_as_if_the_caches_had_stayed_there(name: str, step: int) -> None:
    model, ids = built(name)
    probe, caches = make_prompt_cache(model), make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.uint32), cache=probe)
    past = Rewind(describe(probe), START)
    tail = mx.array(ids[START:])[None]
    ends = sorted({*range(step, TOKENS, step), START, TOKENS - 1, TOKENS})
    for low, high in pairwise([0, *ends]):
        if low == START:
            expected = model(tail, cache=copy.deepcopy(caches))
        model(mx.array(ids[low:high])[None], cache=caches)
        past.watch(caches, high)
        mx.eval([cache.state for cache in caches], past.arrays())
    logits = model(tail, cache=past.caches(model, caches, unchanged))
    # Not the last bits: rows that a window has no longer use for lie in one and not in the other.
    assert mx.allclose(logits, expected, rtol=1e-4, atol=1e-4)
    again = model(tail, cache=past.caches(model, caches, unchanged))
    assert mx.array_equal(logits, again)


@pytest.mark.parametrize("name", ["q8", "q4"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize(
    ("first", "stop"), [(0, 1000), (0, 3), (0, 256), (100, 900), (300, 310), (512, 1024), (2, 600)]
)
def test_rows_come_back_as_the_blocks_of_files_do(name, dtype, dim, first, stop) -> None:
    codec = codecs.get(name)
    rng = np.random.default_rng(0)
    shape = (2, 3, stop - first, dim)
    rows = mx.array(rng.normal(size=shape) + 4 * rng.normal(size=(2, 3, 1, dim))).astype(dtype)
    blocks = []
    cuts = [first, *range(first // BLOCK * BLOCK + BLOCK, stop, BLOCK), stop]
    for low, high in pairwise(cuts):
        block = rows[:, :, low - first : high - first]
        parts = codec.encode(block, raw_tokens=max(0, SINK_TOKENS - low))
        blocks.append(codec.decode(parts, dim=dim, dtype=dtype))
    changed = through(codec)(rows, first)
    assert changed.dtype == dtype
    assert mx.array_equal(changed, mx.concatenate(blocks, axis=2))


def test_what_was_changed_is_in_memory_for_some_layers_at_a_time(monkeypatch) -> None:
    small = zoo.by_name("llama-64")
    model = replace(small, config={**small.config, "num_hidden_layers": 24}).build()
    ids = mx.array(zoo.prompt(small, 2048))[None]
    caches = make_prompt_cache(model)
    model(ids[:, :1], cache=caches)
    past = Rewind(describe(caches), 2000)
    for low, high in ((1, 2000), (2000, 2048)):
        model(ids[:, low:high], cache=caches)
        past.watch(caches, high)
        mx.eval([cache.state for cache in caches], past.arrays())
    held = sum(cache.nbytes for cache in caches)
    monkeypatch.setattr("kvq.cache.rewind.memory_bytes", lambda: 0)  # a layer at a time
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    lossy = past.caches(model, caches, through(codecs.get("q8")))
    logits = model(ids[:, 2000:], cache=lossy)
    del lossy
    mx.eval(logits)
    assert mx.get_peak_memory() - before < held / 2
