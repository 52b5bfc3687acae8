"""Every cache class, through a file and back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache
from unit.stock_caches import ALL, FILLED, ONLY_C, assert_same, feed, slots, trimmed

from kvq.errors import CacheError, UnsupportedModel, UsageError
from kvq.stock import read_prompt_cache, write_prompt_cache


@pytest.mark.parametrize("name", ALL)
def test_every_class_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    cache = [ALL[name](), feed(KVCache(), 3)]
    found = read_prompt_cache(write_prompt_cache(tmp_path / "c", cache))
    assert found.generation == "C"
    for before, after in zip(cache, found.cache, strict=True):
        assert_same(before, after)


@pytest.mark.parametrize("name", FILLED)
def test_generation_a_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    cache = [FILLED[name](), feed(KVCache(), 3)]
    found = read_prompt_cache(write_prompt_cache(tmp_path / "c", cache, generation="A"))
    assert found.generation == "A"
    for before, after in zip(cache, found.cache, strict=True):
        assert_same(before, after)


@pytest.mark.parametrize(
    "name", [name for name in ALL if not name.startswith(("recurrent", "empty recurrent", "list"))]
)
def test_a_cache_goes_on_as_if_it_had_never_been_in_a_file(name: str, tmp_path: Path) -> None:
    cache = ALL[name]()
    width = 64 if "quantized" in name else 8
    value_width = 0 if "no width" in name else width
    restored = read_prompt_cache(write_prompt_cache(tmp_path / "c", [cache])).cache[0]
    for tokens in (1, 1, 5, 1, 260, 1):
        mx.random.seed(tokens)
        feed(cache, tokens, width=width, value_width=value_width)
        mx.random.seed(tokens)
        feed(restored, tokens, width=width, value_width=value_width)
        assert_same(cache, restored)


@pytest.mark.parametrize("generation", ["A", "C"])
def test_writing_does_not_change_the_cache(generation: str, tmp_path: Path) -> None:
    cache = [make() for make in FILLED.values()]
    kept = copy.deepcopy(cache)
    write_prompt_cache(tmp_path / "c", cache, generation=generation)
    for before, after in zip(kept, cache, strict=True):
        assert_same(before, after)
        for attribute in ("keys", "values"):
            one, other = getattr(before, attribute, None), getattr(after, attribute, None)
            if isinstance(one, mx.array):
                assert one.shape == other.shape


def test_only_the_rows_that_count_are_in_the_file(tmp_path: Path) -> None:
    cache = [
        trimmed(feed(KVCache(), 10), 4),
        trimmed(feed(RotatingKVCache(8), 5, 1), 3),
        ALL["quantized, trimmed"](),
        ALL["chunked, trimmed"](),
        ALL["chunked, its front dropped"](),
    ]
    arrays = mx.load(str(write_prompt_cache(tmp_path / "c", cache)))
    rows = {key: array.shape[2] for key, array in arrays.items() if array.ndim == 4}
    expected = {"0": 6, "1": 3, "2": 6, "3": 7, "4": 6}
    assert rows == {key: expected[key[0]] for key in rows}
    assert len(rows) == 2 + 2 + 6 + 2 + 2


def test_a_file_is_far_smaller_than_the_padded_buffers(tmp_path: Path) -> None:
    cache = [feed(KVCache(), 10, width=128) for _ in range(4)]
    ours = write_prompt_cache(tmp_path / "ours", cache).stat().st_size
    mlx_lm_cache.save_prompt_cache(str(tmp_path / "theirs.safetensors"), cache)
    theirs = (tmp_path / "theirs.safetensors").stat().st_size
    payload = 4 * 2 * (2 * 3 * 10 * 128) * 4
    assert payload < ours < payload + 2048
    assert theirs > 25 * payload


@pytest.mark.parametrize(("tokens", "rows"), [(1, 256), (255, 256), (256, 256), (257, 512)])
def test_buffers_are_padded_again(tokens: int, rows: int, tmp_path: Path) -> None:
    cache = [feed(KVCache(), tokens), ALL["quantized, 8 bits"](), feed(RotatingKVCache(300), 7)]
    found = read_prompt_cache(write_prompt_cache(tmp_path / "c", cache)).cache
    assert found[0].keys.shape == found[0].values.shape == (2, 3, rows, 8)
    assert {part.shape[2] for part in (*found[1].keys, *found[1].values)} == {256}
    # A window is as long as its last chunk left it, in mlx-lm too.
    assert found[2].keys.shape[2] == 7


def test_a_padding_that_mlx_lm_wrote_is_kept(tmp_path: Path) -> None:
    cache = [feed(KVCache(), 10), trimmed(feed(KVCache(), 300), 290)]
    mlx_lm_cache.save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
    found = read_prompt_cache(tmp_path / "c.safetensors").cache
    assert [layer.keys.shape[2] for layer in found] == [256, 256]
    for before, after in zip(cache, found, strict=True):
        assert_same(before, after)


def test_a_trim_of_a_concatenated_cache_holds(tmp_path: Path) -> None:
    cache = trimmed(FILLED["concatenated"](), 2)
    keys = cache.keys[:, :, :5]
    found = read_prompt_cache(write_prompt_cache(tmp_path / "c", [cache])).cache[0]
    assert found.offset == 5
    assert mx.array_equal(found.keys, keys)


def test_a_file_of_no_caches(tmp_path: Path) -> None:
    assert read_prompt_cache(write_prompt_cache(tmp_path / "c", [])).cache == []


def test_what_was_read_no_longer_needs_the_file(tmp_path: Path) -> None:
    cache = [FILLED["full"](), FILLED["recurrent"](), FILLED["quantized, 4 bits"]()]
    path = write_prompt_cache(tmp_path / "c", cache)
    found = read_prompt_cache(path)
    with open(path, "r+b") as file:  # in place, as a careless writer does
        file.truncate(0)
    for before, after in zip(cache, found.cache, strict=True):
        assert_same(before, after)


class TestRefusals:
    @pytest.mark.parametrize(
        "batch",
        [
            lambda: BatchKVCache(left_padding=[1, 0]),
            lambda: BatchRotatingKVCache(8, left_padding=[1, 0]),
        ],
    )
    def test_batch_caches_must_be_extracted_first(self, batch: Any, tmp_path: Path) -> None:
        cache = feed(batch(), 6)
        with pytest.raises(CacheError, match=r"layer 1 is a Batch.*extract each sequence"):
            write_prompt_cache(tmp_path / "c", [KVCache(), cache])
        with pytest.raises(CacheError, match=r"layer 0 is a Batch.*extract each sequence"):
            write_prompt_cache(tmp_path / "c", [CacheList(ArraysCache(1), cache)])
        write_prompt_cache(tmp_path / "c", [cache.extract(0)])

    def test_a_class_of_one_model_only(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="layer 0 is a LayerCache"):
            write_prompt_cache(tmp_path / "c", [LayerCache(8)])

    def test_a_subclass_that_could_hold_more(self, tmp_path: Path) -> None:
        class Mine(KVCache):
            pass

        with pytest.raises(UnsupportedModel, match="layer 0 is a Mine"):
            write_prompt_cache(tmp_path / "c", [Mine()])

    @pytest.mark.parametrize("cache", [None, KVCache(), "cache", {"a": KVCache()}])
    def test_something_else(self, cache: Any, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="a prompt cache is a list of caches"):
            write_prompt_cache(tmp_path / "c", cache)

    def test_an_unknown_generation(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="'B' cannot be written: choose 'C' or 'A'"):
            write_prompt_cache(tmp_path / "c", [KVCache()], generation="B")  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ONLY_C)
    def test_what_generation_a_cannot_hold(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(CacheError, match=r"layer 1 \(\w+\): "):
            write_prompt_cache(tmp_path / "c", [feed(KVCache(), 2), ONLY_C[name]()], generation="A")
        assert not list(tmp_path.iterdir())

    def test_a_dtype_that_safetensors_lacks(self, tmp_path: Path) -> None:
        cache = slots(ArraysCache(1), 0)
        cache[0] = cache[0].astype(mx.complex64)
        with pytest.raises(CacheError, match="complex64"):
            write_prompt_cache(tmp_path / "c", [cache])
        assert not list(tmp_path.iterdir())
