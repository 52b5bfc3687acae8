"""Metadata that survives, and token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import ArraysCache, KVCache
from unit.stock_caches import feed, slots

from kvq.errors import FileFormatError, UsageError
from kvq.stock import load_prompt_cache, read_prompt_cache, write_prompt_cache

SURVIVORS: dict[str, Any] = {
    "nothing": {},
    "strings": {"model": "m", "tokenizer_config": "{}"},
    "a key with a dot": {"a.b": "1", "a": "2"},
    "keys of digits": {"0": "x", "1": "y"},
    "digits that Python takes": {"1_0": "x", " 7 ": "y", "٣": "z"},
    "an empty key": {"": "x"},
    "an empty key among others": {"": "x", "a": "y"},
    "nested": {"a": {"b": [1, 2.5, None, True, {"c": []}]}},
    "not strings": {"n": 5, "f": 0.1, "none": None, "no": False},
    "unicode": {"ключ": "значение", "🔑": "💾", "line\nbreak": "\x00\x1f\u2028"},
    "half a surrogate pair": {"\ud800": "\udfff"},
    "a list": [1, "two", {"three": 3}],
    "a string": "just text",
    "an empty string": "",
    "a number": 7,
    "the reserved key": {"kvq": "mine", "model": "m"},
    "long": {"text": "x" * 100_000},
}


@pytest.mark.parametrize("generation", ["A", "C"])
@pytest.mark.parametrize("name", SURVIVORS)
def test_metadata_comes_back_as_it_was_written(name: str, generation: str, tmp_path: Path) -> None:
    cache = [feed(KVCache(), 3)]
    for ids in (None, [7, 8, 9]):
        path = write_prompt_cache(
            tmp_path / "c", cache, SURVIVORS[name], token_ids=ids, generation=generation
        )
        found = read_prompt_cache(path)
        assert found.metadata == SURVIVORS[name]
        assert type(found.metadata) is type(SURVIVORS[name])
        assert load_prompt_cache(path, return_metadata=True)[1] == SURVIVORS[name]


@pytest.mark.parametrize("name", SURVIVORS)
def test_mlx_lm_reads_every_file_whatever_the_metadata(name: str, tmp_path: Path) -> None:
    path = write_prompt_cache(
        tmp_path / "c", [feed(KVCache(), 3)], SURVIVORS[name], token_ids=[1, 2, 3]
    )
    cache, metadata = mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)
    assert cache[0].offset == 3
    assert isinstance(metadata, dict)


def test_mlx_lm_sees_what_it_can_keep(tmp_path: Path) -> None:
    written = {"model": "m", "tokenizer_config": {"eos_token": "</s>"}, "n": 5, "a.b": "lost"}
    path = write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)], written)
    _, metadata = mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)
    assert metadata.pop("kvq")
    assert metadata == {"model": "m", "tokenizer_config": '{"eos_token": "</s>"}', "n": "5"}
    assert json.loads(metadata["tokenizer_config"]) == written["tokenizer_config"]


def test_strings_alone_are_written_as_mlx_lm_writes_them(tmp_path: Path) -> None:
    written = {"model": "m", "tokenizer_config": "{}"}
    path = write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)], written)
    _, metadata = mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)
    assert metadata == written


def test_no_metadata_is_an_empty_object(tmp_path: Path) -> None:
    path = write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)])
    assert read_prompt_cache(path).metadata == {}
    path = write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)], token_ids=[1, 2, 3])
    assert read_prompt_cache(path).metadata == {}


@pytest.mark.parametrize(
    "written", [{"a.b": "1", "c": "2"}, {"0": "x", "1": "y"}, {"": "x", "a": "b"}]
)
def test_keys_that_mlx_lm_garbles_are_read_from_its_files(
    written: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "c.safetensors"
    mlx_lm_cache.save_prompt_cache(str(path), [feed(KVCache(), 3)], written)
    assert read_prompt_cache(path).metadata == written


@pytest.mark.parametrize("metadata", [{"a": object()}, {"a": float("nan")}, {("a",): 1}, {1, 2}])
def test_what_is_not_json_is_refused(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="metadata cannot be written as JSON"):
        write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)], metadata)
    assert not list(tmp_path.iterdir())


def test_metadata_that_holds_itself_is_refused(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {}
    metadata["a"] = metadata
    with pytest.raises(UsageError, match="metadata cannot be written as JSON"):
        write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)], metadata)


class TestTokenIds:
    @pytest.mark.parametrize("generation", ["A", "C"])
    @pytest.mark.parametrize(
        "ids",
        [
            [0, 262143, 2**32 - 1],
            (5, 5, 5),
            np.array([1, 2, 3], dtype=np.uint32),
            iter([4, 5, 6]),
        ],
    )
    def test_they_come_back(self, ids: Any, generation: str, tmp_path: Path) -> None:
        expected = [4, 5, 6] if hasattr(ids, "__next__") else [int(token) for token in ids]
        cache = [feed(KVCache(), 3)]
        if hasattr(ids, "__next__"):
            ids = iter(expected)
        path = write_prompt_cache(tmp_path / "c", cache, token_ids=ids, generation=generation)
        found = read_prompt_cache(path).token_ids
        assert found is not None
        assert found.dtype == np.uint32
        assert found.tolist() == expected

    def test_from_mlx(self, tmp_path: Path) -> None:
        ids = mx.array([3, 1, 2], dtype=mx.uint32)
        path = write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)], token_ids=ids)
        assert read_prompt_cache(path).token_ids.tolist() == [3, 1, 2]

    @pytest.mark.parametrize("ids", [[-1, 2, 3], [1, 2, 2**32]])
    def test_they_must_be_token_ids(self, ids: list[int], tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="token ids must be from 0 to 4294967295"):
            write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)], token_ids=ids)

    @pytest.mark.parametrize("ids", [[1.0, 2, 3], "abc", [[1, 2, 3]], np.ones(3), [None]])
    def test_they_must_be_whole_numbers(self, ids: Any, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="token ids must be whole numbers"):
            write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)], token_ids=ids)

    def test_they_must_be_as_many_as_the_caches_cover(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="2 token ids for caches that cover 3 tokens"):
            write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)], token_ids=[1, 2])

    def test_recurrent_caches_do_not_say_how_many_they_cover(self, tmp_path: Path) -> None:
        cache = [slots(ArraysCache(1), 0)]
        found = read_prompt_cache(write_prompt_cache(tmp_path / "c", cache, token_ids=[1, 2]))
        assert found.tokens is None
        assert found.token_ids.tolist() == [1, 2]

    def test_a_layer_that_was_never_filled_does_not_count(self, tmp_path: Path) -> None:
        cache = [KVCache(), feed(KVCache(), 3)]
        found = read_prompt_cache(write_prompt_cache(tmp_path / "c", cache, token_ids=[1, 2, 3]))
        assert found.tokens == 3

    def test_none_is_not_the_same_as_no_tokens(self, tmp_path: Path) -> None:
        assert read_prompt_cache(write_prompt_cache(tmp_path / "c", [KVCache()])).token_ids is None
        path = write_prompt_cache(tmp_path / "c", [KVCache()], token_ids=[])
        assert read_prompt_cache(path).token_ids.tolist() == []


class TestForeignEntries:
    """A file may have an entry of our name that is not ours."""

    def _file(self, tmp_path: Path, text: str) -> Path:
        path = tmp_path / "c.safetensors"
        mlx_lm_cache.save_prompt_cache(str(path), [feed(KVCache(), 3)], {"kvq": text, "a": "b"})
        return path

    @pytest.mark.parametrize("text", ["", "mine", "[1]", "{}", '{"format": 1}', "[" * 100_000])
    def test_is_left_alone(self, text: str, tmp_path: Path) -> None:
        found = read_prompt_cache(self._file(tmp_path, text))
        assert found.metadata == {"kvq": text, "a": "b"}
        assert found.token_ids is None

    def test_of_a_newer_kvq(self, tmp_path: Path) -> None:
        text = json.dumps({"format": 2, "metadata": {}, "token_ids": None})
        with pytest.raises(FileFormatError, match="written by a newer kvq"):
            read_prompt_cache(self._file(tmp_path, text))

    @pytest.mark.parametrize(
        "ids", [[1, 2, -3], [1, 2, 2**32], [1, 2, "3"], [1, True, 2], "abc", 5]
    )
    def test_with_damaged_token_ids(self, ids: Any, tmp_path: Path) -> None:
        text = json.dumps({"format": 1, "metadata": {}, "token_ids": ids})
        with pytest.raises(FileFormatError, match="token ids are damaged"):
            read_prompt_cache(self._file(tmp_path, text))

    def test_with_token_ids_of_another_length(self, tmp_path: Path) -> None:
        text = json.dumps({"format": 1, "metadata": {}, "token_ids": [1, 2]})
        with pytest.raises(FileFormatError, match="2 token ids, but its caches hold 3 tokens"):
            read_prompt_cache(self._file(tmp_path, text))
