"""What only files of mlx-swift-lm have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, QuantizedKVCache

from kvq.errors import FileFormatError
from kvq.stock import PromptCacheFile, read_prompt_cache

Part = tuple[str, list[str], list[mx.array]]


def kv(rows: int, width: int = 4) -> list[mx.array]:
    return [mx.random.normal((1, 2, rows, width)) for _ in range(2)]


def quantized(rows: int) -> list[mx.array]:
    return [part for array in kv(rows, 32) for part in mx.quantize(array, group_size=32, bits=8)]


def read(folder: Path, *layers: Part, **metadata: str) -> PromptCacheFile:
    """Write these layers (class, fields, tensors) as mlx-swift-lm does, and read them."""
    arrays: dict[str, mx.array] = {}
    header = {f"1.{key}": value for key, value in metadata.items()}
    for index, (name, fields, state) in enumerate(layers):
        header[f"2.{index}"] = name
        header |= {f"0.{index}.{place}": field for place, field in enumerate(fields)}
        arrays |= {f"{index}.{place}": array for place, array in enumerate(state)}
    mx.save_safetensors(str(folder / "swift.safetensors"), arrays, header)
    return read_prompt_cache(folder / "swift.safetensors")


FULL: Part = ("KVCache", [""], kv(5))


def test_the_other_name_of_a_full_cache(tmp_path: Path) -> None:
    found = read(tmp_path, ("KVCacheSimple", [""], kv(5)), model="m")
    assert found.generation == "swift"
    assert found.metadata == {"model": "m"}
    assert isinstance(found.cache[0], KVCache)
    assert found.tokens == 5


def test_layers_without_tensors_are_empty(tmp_path: Path) -> None:
    layers: list[Part] = [
        ("KVCache", [""], []),
        ("RotatingKVCache", ["4", "8", "256", "0", "0", "modelNative"], []),
        ("QuantizedKVCache", ["256", "0", "32", "8"], []),
        ("ChunkedKVCache", ["16", "0"], []),
        ("ArraysCache", ["2", ""], []),
    ]
    found = read(tmp_path, *layers, FULL).cache
    assert [layer.empty() for layer in found] == [True] * 5 + [False]
    assert (found[1].max_size, found[1].keep) == (8, 4)
    assert (found[2].group_size, found[2].bits) == (32, 8)
    assert isinstance(found[3], ChunkedKVCache)
    assert len(found[4].cache) == 2


@pytest.mark.parametrize("origin", [[], ["modelNative"], ["requested"]])
def test_windows_of_five_and_six_fields(origin: list[str], tmp_path: Path) -> None:
    fields = ["2", "8", "256", "11", "5", *origin]
    found = read(tmp_path, FULL, ("RotatingKVCache", fields, kv(8)))
    layer = found.cache[1]
    assert found.generation == "swift"
    assert (layer.keep, layer.max_size, layer.offset, layer._idx) == (2, 8, 11, 5)


def test_windows_of_five_fields_alone_are_those_of_generation_a(tmp_path: Path) -> None:
    fields = ["2", "8", "256", "11", "5"]
    assert read(tmp_path, ("RotatingKVCache", fields, kv(8))).generation == "A"


def test_quantized_tensors_in_one_row(tmp_path: Path) -> None:
    tensors = quantized(6)
    found = read(tmp_path, ("QuantizedKVCache", ["256", "6", "32", "8"], tensors))
    layer = found.cache[0]
    assert found.generation == "swift"
    assert isinstance(layer, QuantizedKVCache)
    keys, values = layer.keys_and_values()
    for before, after in zip(tensors, (*keys, *values), strict=True):
        assert mx.array_equal(before, after)


class TestRecurrent:
    def _read(self, folder: Path, fields: list[str], tensors: int) -> ArraysCache:
        state = [mx.full((1, 3), float(index)) for index in range(tensors)]
        layer = read(folder, ("ArraysCache", fields, state)).cache[0]
        assert isinstance(layer, ArraysCache)
        return layer

    def test_slots_that_are_missing(self, tmp_path: Path) -> None:
        layer = self._read(tmp_path, ["4", "1,3"], 2)
        assert [slot is None for slot in layer.cache] == [True, False, True, False]
        assert layer.cache[3][0, 0].item() == 1
        assert (layer.left_padding, layer.lengths) == (None, None)

    def test_padding(self, tmp_path: Path) -> None:
        layer = self._read(tmp_path, ["1", "0", "2,0", "5,7"], 1)
        assert layer.left_padding.tolist() == [2, 0]
        assert layer.lengths.tolist() == [5, 7]

    def test_lengths_without_padding(self, tmp_path: Path) -> None:
        layer = self._read(tmp_path, ["1", "0", "", "5,7"], 1)
        assert layer.left_padding is None
        assert layer.lengths.tolist() == [5, 7]

    def test_written_before_slots_were(self, tmp_path: Path) -> None:
        assert len(self._read(tmp_path, [""], 2).cache) == 2

    def test_mamba(self, tmp_path: Path) -> None:
        state = [mx.ones((1, 3)), mx.zeros((1, 3))]
        layer = read(tmp_path, ("MambaCache", ["2", "0,1"], state)).cache[0]
        assert type(layer) is ArraysCache

    @pytest.mark.parametrize(
        "fields",
        [
            ["2", "0,1,2"],
            ["2", "0"],
            ["2", "1,0"],
            ["2", "0,0"],
            ["2", "0,2"],
            ["2", "-1,0"],
            ["1", "0,1"],
            ["999999", "0,1"],
            ["two", "0,1"],
            ["2", "0,one"],
            ["2", "0,1", "x"],
            ["2"],
            ["2", "0,1", "", "", ""],
        ],
    )
    def test_slots_that_do_not_fit(self, fields: list[str], tmp_path: Path) -> None:
        with pytest.raises(FileFormatError, match=r"layer 0 \(ArraysCache\)"):
            self._read(tmp_path, fields, 2)


class TestLists:
    def test_nested(self, tmp_path: Path) -> None:
        inner = ["1", "ArraysCache", "1", "2", "2", "1"]
        fields = ["2", "KVCache", "2", "1", "", "CacheList", "1", str(len(inner)), *inner]
        found = read(tmp_path, ("CacheList", fields, [*kv(5), mx.ones((1, 3))]))
        full, nested = found.cache[0].caches
        assert full.offset == 5
        assert [slot is None for slot in nested.caches[0].cache] == [True, False]

    def test_nested_without_end(self, tmp_path: Path) -> None:
        fields = ["1", "ArraysCache", "0", "2", "1", ""]
        for _ in range(2000):
            fields = ["1", "CacheList", "0", str(len(fields)), *fields]
        with pytest.raises(FileFormatError, match="nested too deeply"):
            read(tmp_path, ("CacheList", fields, []))

    def test_very_many(self, tmp_path: Path) -> None:
        fields = ["2000", *(["KVCache", "0", "1", ""] * 2000)]
        assert len(read(tmp_path, ("CacheList", fields, [])).cache[0].caches) == 2000

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            (["1", "KVCache", "2", "1"], "need more fields than it has"),
            (["2", "KVCache", "2", "1", ""], "need more fields than it has"),
            (["1", "KVCache", "3", "1", ""], "need more tensors than it has"),
            (["1", "KVCache", "2", "1", "", "x"], "more fields or tensors"),
            (["1", "KVCache", "0", "1", ""], "more fields or tensors"),
            (["1", "KVCache", "-2", "1", ""], "-2 is not a count"),
            (["0"], "more fields or tensors"),
            (["1", "copy", "2", "1", ""], "'copy' is none of mlx-lm's"),
            (["999999999", "KVCache", "2", "1", ""], "need more fields than it has"),
        ],
    )
    def test_parts_that_do_not_fit(self, fields: list[str], reason: str, tmp_path: Path) -> None:
        with pytest.raises(FileFormatError, match=reason):
            read(tmp_path, ("CacheList", fields, kv(5)))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (("KVCache", [""], kv(5)[:1]), "does not have 2 tensors"),
        (("KVCache", [""], [mx.zeros((2, 5)), mx.zeros((2, 5))]), "2 dimensions instead of 4"),
        (("KVCache", ["x"], kv(5)), "header has fields"),
        (("RotatingKVCache", ["0", "8", "256", "5", "5", "?"], kv(5)), "origin of its window"),
        (("RotatingKVCache", ["0", "None", "256", "5", "5"], kv(5)), "'None' should be a whole"),
        (("QuantizedKVCache", ["256", "6", "32", "8"], quantized(6)[:4]), "without biases"),
        (("QuantizedKVCache", ["256", "6", "32", "8"], quantized(6)[:5]), "does not have 6"),
        (("QuantizedKVCache", ["256", "6", "32", "8"], []), "has no arrays, but says"),
        (("ChunkedKVCache", ["None", "0"], kv(5)), "'None' should be a whole number"),
        (("ChunkedKVCache", ["8", "4"], []), "is empty, but says it has seen 4"),
        (("RotatingKVCache", ["0", "8", "256", "5", "5", "requested"], []), "is empty, but says"),
    ],
)
def test_parts_that_do_not_fit(layer: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=reason):
        read(tmp_path, FULL, layer)


def test_the_state_of_a_vision_model_has_no_place(tmp_path: Path) -> None:
    path = tmp_path / "swift.safetensors"
    arrays = dict(zip(("0.0", "0.1"), kv(5), strict=True))
    header = {"0.0.0": "", "2.0": "__mlx_lm_state_v1__:KVCache"}
    mx.save_safetensors(str(path), arrays, header)
    with pytest.raises(FileFormatError, match="state of a vision model"):
        read_prompt_cache(path)
    arrays["__mlx_lm_state_tensor_0"] = mx.zeros(1)
    header["2.0"] = "KVCache"
    mx.save_safetensors(str(path), arrays, header)
    with pytest.raises(FileFormatError, match="state of a vision model"):
        read_prompt_cache(path)
