"""The functions that stand in for mlx-lm's: what they share with them, and where they differ."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fixtures.stock_scenarios import PROMPT, SCENARIOS, Scenario, feed, resume, scenario
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from unit.stock_caches import assert_same, slots
from unit.stock_caches import feed as fill

from kvq import stock
from kvq.errors import UsageError

NAMES = (
    "make_prompt_cache",
    "save_prompt_cache",
    "load_prompt_cache",
    "can_trim_prompt_cache",
    "trim_prompt_cache",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_are_those_of_mlx_lm(name: str) -> None:
    ours = inspect.signature(getattr(stock, name)).parameters
    theirs = inspect.signature(getattr(mlx_lm_cache, name)).parameters
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]


class TestMake:
    def test_ours_can_take_the_place_of_mlx_lms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in NAMES:
            monkeypatch.setattr(mlx_lm_cache, name, getattr(stock, name))
        assert len(mlx_lm_cache.make_prompt_cache(scenario("full").build())) == 2

    def test_a_model_without_its_own_caches(self) -> None:
        model = scenario("full").build()
        assert [type(layer) for layer in stock.make_prompt_cache(model)] == [KVCache] * 2
        windows = stock.make_prompt_cache(model, max_kv_size=8)
        assert [(type(w), w.max_size, w.keep) for w in windows] == [(RotatingKVCache, 8, 4)] * 2

    def test_a_model_with_its_own_caches(self) -> None:
        model = scenario("hybrid").build()
        assert [type(layer) for layer in stock.make_prompt_cache(model, 8)] == [
            ArraysCache,
            KVCache,
        ]


class TestSaveAndLoad:
    def test_the_metadata_only_if_asked(self, tmp_path: Path) -> None:
        path = str(tmp_path / "c.safetensors")
        cache = [fill(KVCache(), 4), fill(RotatingKVCache(3), 5)]
        assert stock.save_prompt_cache(path, cache, {"a": "b"}) is None
        alone = stock.load_prompt_cache(path)
        together, metadata = stock.load_prompt_cache(path, return_metadata=True)
        assert metadata == {"a": "b"}
        for before, one, other in zip(cache, alone, together, strict=True):
            assert_same(before, one)
            assert_same(before, other)

    def test_saving_again_replaces(self, tmp_path: Path) -> None:
        path = tmp_path / "c.safetensors"
        stock.save_prompt_cache(path, [fill(KVCache(), 4)])
        stock.save_prompt_cache(path, [fill(KVCache(), 6)])
        assert stock.load_prompt_cache(path)[0].offset == 6

    @pytest.mark.parametrize("case", SCENARIOS, ids=lambda case: case.name)
    def test_a_model_resumes_as_if_uninterrupted(self, case: Scenario, tmp_path: Path) -> None:
        model = case.build()
        cache = case.make(model)
        case.prefill(model, cache)
        path = tmp_path / "c.safetensors"
        stock.save_prompt_cache(path, cache)
        # Reading by mlx-lm too: what we compact it must take for the same.
        ours, theirs = stock.load_prompt_cache(path), mlx_lm_cache.load_prompt_cache(str(path))
        tokens, logits = resume(model, cache)
        for restored in (ours, theirs):
            resumed_tokens, resumed_logits = resume(model, restored)
            assert resumed_tokens == tokens
            assert mx.array_equal(resumed_logits, logits)

    @pytest.mark.parametrize("case", SCENARIOS, ids=lambda case: case.name)
    def test_files_that_mlx_lm_wrote(self, case: Scenario, tmp_path: Path) -> None:
        model = case.build()
        cache = case.make(model)
        case.prefill(model, cache)
        path = str(tmp_path / "c.safetensors")
        mlx_lm_cache.save_prompt_cache(path, cache, {"model": "m"})
        found = stock.read_prompt_cache(path)
        assert found.generation == "C"
        assert found.metadata == {"model": "m"}
        for before, after in zip(cache, found.cache, strict=True):
            assert_same(before, after)
        tokens, logits = resume(model, cache)
        resumed_tokens, resumed_logits = resume(model, found.cache)
        assert resumed_tokens == tokens
        assert mx.array_equal(resumed_logits, logits)

    def test_between_two_calls_of_generate_step(self, tmp_path: Path) -> None:
        model = scenario("full").build()
        prompt = mx.array(PROMPT)
        whole = list(generate_step(prompt, model, max_tokens=6))
        cache = stock.make_prompt_cache(model)
        first = list(generate_step(prompt, model, max_tokens=3, prompt_cache=cache))
        stock.save_prompt_cache(tmp_path / "c", cache)
        restored = stock.load_prompt_cache(tmp_path / "c.safetensors")
        # The cache holds the three tokens that were given; the fourth comes next.
        fourth = mx.array([whole[3][0]])
        second = list(generate_step(fourth, model, max_tokens=2, prompt_cache=restored))
        resumed = first + whole[3:4] + second
        assert [token for token, _ in resumed] == [token for token, _ in whole]
        for (_, one), (_, other) in zip(resumed, whole, strict=True):
            assert np.allclose(np.array(one), np.array(other), atol=1e-5)

    def test_a_window_goes_on_rotating_where_it_was(self, tmp_path: Path) -> None:
        cache = fill(RotatingKVCache(8, keep=2), 11, 1, 1)
        stock.save_prompt_cache(tmp_path / "c", [cache])
        restored = stock.load_prompt_cache(tmp_path / "c.safetensors")[0]
        for _ in range(10):
            keys = mx.random.normal((2, 3, 1, 8))
            one, other = cache.update_and_fetch(keys, keys), restored.update_and_fetch(keys, keys)
            assert mx.array_equal(one[0], other[0])
            assert mx.array_equal(one[1], other[1])

    def test_a_recurrent_cache_can_mask_after_loading(self, tmp_path: Path) -> None:
        stock.save_prompt_cache(tmp_path / "c", [slots(ArraysCache(2), 0, 1)])
        assert stock.load_prompt_cache(tmp_path / "c.safetensors")[0].make_mask(4) is None


class TestTrim:
    @pytest.mark.parametrize("wanted", [0, 1, 6, 10, 11, 500])
    @pytest.mark.parametrize(
        "make",
        [KVCache, lambda: QuantizedKVCache(32, 8), lambda: RotatingKVCache(64)],
        ids=["full", "quantized", "window"],
    )
    def test_as_many_as_there_are(self, make: Any, wanted: int) -> None:
        ours = [fill(make(), 10, width=32) for _ in range(2)]
        theirs = copy.deepcopy(ours)
        assert stock.trim_prompt_cache(ours, wanted) == min(wanted, 10)
        assert mlx_lm_cache.trim_prompt_cache(theirs, wanted) == min(wanted, 10)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)

    @pytest.mark.parametrize(
        "cache",
        [
            lambda: [],
            lambda: [slots(ArraysCache(2), 0, 1)],
            lambda: [fill(KVCache(), 10), slots(ArraysCache(1), 0)],
            lambda: [fill(KVCache(), 10), CacheList(fill(KVCache(), 10), ArraysCache(1))],
            lambda: [fill(KVCache(), 10), fill(RotatingKVCache(8), 10)],
            lambda: [fill(RotatingKVCache(10), 10)],
        ],
    )
    def test_none_where_one_layer_cannot(self, cache: Any) -> None:
        caches = cache()
        kept = copy.deepcopy(caches)
        assert stock.trim_prompt_cache(caches, 3) == 0
        assert mlx_lm_cache.trim_prompt_cache(copy.deepcopy(kept), 3) == 0
        assert stock.can_trim_prompt_cache(caches) == mlx_lm_cache.can_trim_prompt_cache(kept)
        for before, after in zip(kept, caches, strict=True):
            assert_same(before, after)

    def test_inside_lists(self) -> None:
        cache = [CacheList(fill(KVCache(), 10), CacheList(fill(KVCache(), 10))) for _ in range(2)]
        assert stock.can_trim_prompt_cache(cache)
        assert stock.trim_prompt_cache(cache, 4) == 4
        assert [cache[1][0].offset, cache[1][1][0].offset] == [6, 6]

    def test_batches(self) -> None:
        cache = [fill(BatchKVCache([0, 1]), 10), fill(BatchRotatingKVCache(16, [0, 1]), 10)]
        assert stock.trim_prompt_cache(cache, 4) == 4
        assert [layer.offset.tolist() for layer in cache] == [[6, 5], [6, 5]]

    @pytest.mark.parametrize("name", ["full", "quantized", "window-open"])
    def test_the_logits_are_those_of_the_shorter_prompt(self, name: str) -> None:
        case = scenario(name)
        model = case.build()
        cache = case.make(model)
        ids = list(case.token_ids)
        feed(model, ids[:3], cache)
        shorter = copy.deepcopy(cache)
        feed(model, ids[3:5], cache)
        assert stock.trim_prompt_cache(cache, 2) == 2
        assert mx.array_equal(resume(model, cache)[1], resume(model, shorter)[1])

    def test_a_copy_is_not_trimmed_along(self) -> None:
        cache = [fill(KVCache(), 10, 1)]
        kept = copy.deepcopy(cache)
        assert stock.trim_prompt_cache(cache, 1) == 1
        fill(cache[0], 1)
        assert (cache[0].offset, kept[0].offset) == (11, 11)
        assert mx.array_equal(cache[0].keys[:, :, :10], kept[0].keys[:, :, :10])
        assert not mx.array_equal(cache[0].keys[:, :, 10], kept[0].keys[:, :, 10])


class TestStricterThanMlxLm:
    @pytest.mark.parametrize("number", [-1, -500])
    def test_a_negative_number(self, number: int) -> None:
        cache = [fill(KVCache(), 10)]
        with pytest.raises(UsageError, match=f"cannot trim {number} tokens"):
            stock.trim_prompt_cache(cache, number)
        assert cache[0].offset == 10

    @pytest.mark.parametrize("number", [1.5, "3", None])
    def test_not_a_whole_number(self, number: Any) -> None:
        with pytest.raises(TypeError):
            stock.trim_prompt_cache([fill(KVCache(), 10)], number)

    def test_a_chunk_that_has_dropped_its_front(self) -> None:
        cache = [fill(ChunkedKVCache(4), 3, 4, 2), fill(KVCache(), 9)]
        assert mlx_lm_cache.can_trim_prompt_cache(cache)
        assert not stock.can_trim_prompt_cache(cache)
        assert stock.trim_prompt_cache(cache, 2) == 0
        assert [layer.offset for layer in cache] == [9, 9]

    def test_a_chunk_that_has_not(self) -> None:
        cache = [fill(ChunkedKVCache(16), 3, 4, 2), fill(KVCache(), 9)]
        assert stock.trim_prompt_cache(cache, 2) == 2
        assert [layer.offset for layer in cache] == [7, 7]

    def test_layers_of_different_lengths_lose_the_same(self) -> None:
        cache = [fill(KVCache(), 10), fill(KVCache(), 3)]
        assert stock.trim_prompt_cache(cache, 5) == 3
        assert [layer.offset for layer in cache] == [7, 0]

    def test_a_layer_that_was_never_filled_does_not_count(self) -> None:
        cache = [KVCache(), fill(KVCache(), 10), CacheList(KVCache(), fill(KVCache(), 10))]
        assert stock.trim_prompt_cache(cache, 5) == 5
        assert [cache[0].offset, cache[1].offset, cache[2][1].offset] == [0, 5, 5]
        assert stock.trim_prompt_cache([KVCache()], 5) == 0

    def test_a_concatenated_cache_is_really_trimmed(self) -> None:
        cache = fill(ConcatenateKVCache(), 10)
        first = cache.keys[:, :, :6]
        assert stock.trim_prompt_cache([cache], 4) == 4
        fill(cache, 1)
        assert cache.offset == 7
        assert mx.array_equal(cache.keys[:, :, :6], first)
