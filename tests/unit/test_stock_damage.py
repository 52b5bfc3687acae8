"""Files that are damaged, hostile, or of caches that mlx-lm cannot hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import BatchKVCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache
from unit.stock_caches import FILLED, feed, slots

from kvq.errors import FileFormatError, UsageError
from kvq.stock import read_prompt_cache, write_prompt_cache

Arrays = dict[str, mx.array]
Header = dict[str, str]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_prompt_cache(
        tmp_path / "good", [feed(KVCache(), 9), feed(RotatingKVCache(8), 9)], {"model": "m"}
    )


def change(path: Path, edit: Callable[[Arrays, Header], Any]) -> Path:
    """A copy of `path` after `edit` has changed its tensors and header."""
    arrays, header = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    edit(arrays, header)
    changed = path.with_name("changed.safetensors")
    mx.save_safetensors(str(changed), arrays, header)
    return changed


def drop(*keys: str) -> Callable[[Arrays, Header], None]:
    def edit(arrays: Arrays, header: Header) -> None:
        for key in keys:
            arrays.pop(key, None)
            header.pop(key, None)

    return edit


def put(**values: Any) -> Callable[[Arrays, Header], None]:
    """Set tensors (arrays) and entries (strings); `_` in a name stands for a dot."""

    def edit(arrays: Arrays, header: Header) -> None:
        for key, value in values.items():
            name = key.lstrip("_").replace("_", ".")
            if isinstance(value, str):
                header[name] = value
            else:
                arrays[name] = value

    return edit


class TestBytes:
    def test_cut_short_anywhere(self, good: Path) -> None:
        whole = good.read_bytes()
        for length in [*range(0, 64), *range(64, len(whole), 97), len(whole) - 1]:
            good.write_bytes(whole[:length])
            with pytest.raises(FileFormatError, match=r"good\.safetensors: "):
                read_prompt_cache(good)

    def test_with_something_after_the_end(self, good: Path) -> None:
        good.write_bytes(good.read_bytes() + b"\0")
        with pytest.raises(FileFormatError, match="not a whole safetensors file"):
            read_prompt_cache(good)

    def test_any_byte_of_the_header_changed_is_read_or_refused(self, good: Path) -> None:
        whole = good.read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        for place in range(0, end, 3):
            damaged = bytearray(whole)
            damaged[place] ^= 0x15
            good.write_bytes(damaged)
            try:
                found = read_prompt_cache(good)
            except FileFormatError:
                continue
            assert len(found.cache) == 2

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"garbage",
            b"\xff" * 64,
            b"{}",
            b"\x02\0\0\0\0\0\0\0{}",
            b"PK\x03\x04" + b"\0" * 100,
            b"\x93NUMPY\x01\0" + b"\0" * 100,
            (100_000).to_bytes(8, "little") + b"{" + b"[" * 99_999,
        ],
    )
    def test_not_safetensors(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "c.safetensors"
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=r"c\.safetensors: "):
            read_prompt_cache(path)

    def test_a_tensor_larger_than_the_file(self, tmp_path: Path) -> None:
        header = {"0.0": {"dtype": "F32", "shape": [1, 1, 2**30, 4], "data_offsets": [0, 2**34]}}
        text = json.dumps(header).encode()
        path = tmp_path / "c.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(FileFormatError, match="not a whole safetensors file"):
            read_prompt_cache(path)

    def test_another_safetensors_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        mx.save_safetensors(str(path), {"model.embed.weight": mx.zeros((2, 2))}, {"format": "mlx"})
        with pytest.raises(FileFormatError, match="not a prompt cache"):
            read_prompt_cache(path)

    def test_the_suffix_does_not_matter(self, good: Path) -> None:
        renamed = good.rename(good.with_name("cache.bin"))
        assert len(read_prompt_cache(renamed).cache) == 2

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="there is no such file"):
            read_prompt_cache(tmp_path / "none.safetensors")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="it is not a file"):
            read_prompt_cache(tmp_path)

    def test_a_named_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        path = tmp_path / "pipe.safetensors"
        os.mkfifo(path)
        with pytest.raises(UsageError, match="it is not a file"):
            read_prompt_cache(path)


class TestClassNames:
    @pytest.mark.parametrize("generation", ["A", "C"])
    @pytest.mark.parametrize(
        "name",
        [
            "copy",
            "mx",
            "_BaseCache",
            "LRUPromptCache",
            "PromptTrie",
            "make_prompt_cache",
            "os.system",
            "__import__",
            "KVCache ",
            "kvcache",
            "LayerCache",
            "TurboQuantKVCache",
            "KVCache\x00",
            "K" * 5000,
            "\n\x1b[31m",
        ],
    )
    def test_unknown_and_hostile_ones_are_refused(
        self, name: str, generation: str, tmp_path: Path
    ) -> None:
        index = "2" if generation == "A" else "1"
        path = write_prompt_cache(tmp_path / "g", [feed(KVCache(), 2)], generation=generation)
        changed = change(path, lambda arrays, header: header.update({f"{index}.0": name}))
        with pytest.raises(FileFormatError, match=r"layer 0 is of class .* none of mlx-lm's") as e:
            read_prompt_cache(changed)
        assert len(str(e.value)) < len(str(changed)) + 150
        assert str(e.value).isprintable()

    def test_inside_a_list(self, tmp_path: Path) -> None:
        path = write_prompt_cache(tmp_path / "g", [CacheList(feed(KVCache(), 2))])
        name = mx.array([ord(character) for character in "copy"])
        with pytest.raises(FileFormatError, match=r"layer 0 \(CacheList\): 'copy' is none of"):
            read_prompt_cache(change(path, put(_0_0_1=name)))

    def test_a_batch_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "batch.safetensors"
        mlx_lm_cache.save_prompt_cache(str(path), [feed(BatchKVCache([0, 1]), 4)])
        with pytest.raises(FileFormatError, match=r"layer 0 is a BatchKVCache: .* Extract each"):
            read_prompt_cache(path)

    def test_a_class_of_one_model_only(self, tmp_path: Path) -> None:
        path = tmp_path / "c.safetensors"
        arrays = {f"0.{index}": mx.zeros((1, 2, 3)) for index in range(6)}
        mx.save_safetensors(str(path), arrays, {"1.0": "LayerCache", "2.0": ""})
        with pytest.raises(FileFormatError, match="'LayerCache', which is none of mlx-lm's"):
            read_prompt_cache(path)


class TestCurrentGeneration:
    @pytest.mark.parametrize(
        ("edit", "reason"),
        [
            (lambda arrays, header: header.pop("1.1"), "names 1 caches and has tensors for 2"),
            (drop("1.1"), "part 1 is missing"),
            (drop("1.0"), "class 0 is missing"),
            (drop("0.0"), r"part 0 is missing"),
            (drop("0.2"), "list of scalars has '0.2'"),
            (drop("2.1.0"), "part 0 is missing"),
            (drop("2.1.0", "2.1.1"), "scalar 1 is missing"),
            (put(_2_1_1="pickle"), "list of scalars has '0.2' as 'pickle'"),
            (put(_2_1_0="9.9"), "list of scalars has '9.9'"),
            (put(_2_1_0="__class__"), "list of scalars has '__class__'"),
            (put(_0_3=mx.zeros(1)), r"layer 0 \(KVCache\): its state does not have 3 parts"),
            (put(_0_2=mx.array(10)), "has 9 rows, but says it holds 10 tokens"),
            (put(_0_2=mx.array(-1)), "has 9 rows, but says it holds -1 tokens"),
            (put(_0_2=mx.array(2.0)), "should be a whole number"),
            (put(_0_2=mx.array([1, 2])), "one of its numbers is damaged"),
            (put(_0_2=mx.array(True)), "should be a whole number"),
            (put(_0_0=mx.zeros((9, 8))), "2 and 4 dimensions instead of 4"),
            (put(_0_0=mx.zeros((2, 3, 8, 8))), "arrays do not match"),
            (put(_0_0=mx.zeros((1, 3, 9, 8))), "arrays do not match"),
            (put(_1_1="ArraysCache"), r"layer 1 \(ArraysCache\): its state does not have 3 parts"),
            (put(_1_0="CacheList"), "its state is not a list of caches"),
            (put(_1_2=mx.array(50), _1_0=mx.zeros((2, 3, 2, 8))), r"layer 1 .*do not match"),
            (put(_1_4=mx.array(0)), "a window of 0 rows cannot keep 0"),
            (put(_1_3=mx.array(9)), "a window of 8 rows cannot keep 9"),
            (put(_1_4=mx.array(64), _1_2=mx.array(60)), "9 rows are too few for 60 tokens"),
            (put(_1_5=mx.array(10)), "write position 10 is outside its 9 rows"),
            (lambda arrays, header: arrays.update({"x": mx.zeros(1)}), "'x' is not a name"),
            (lambda arrays, header: arrays.update({"0.00": mx.zeros(1)}), "'0.00' is not a name"),
            (lambda arrays, header: arrays.update({"-1": mx.zeros(1)}), "'-1' is not a name"),
            (lambda arrays, header: arrays.update({"5.0": mx.zeros(1)}), "layer 2 is missing"),
            (lambda arrays, header: arrays.update({"0.0.0": mx.zeros(1)}), r"inside"),
            (
                lambda arrays, header: arrays.update({".".join("0" * 40): mx.zeros(1)}),
                "is not a name",
            ),
        ],
    )
    def test_parts_that_do_not_fit(self, edit: Any, reason: str, good: Path) -> None:
        with pytest.raises(FileFormatError, match=reason):
            read_prompt_cache(change(good, edit))

    @pytest.mark.parametrize(
        ("name", "edit", "reason"),
        [
            ("quantized, 8 bits", put(_0_3=mx.array(48)), "8 bits in groups of 48"),
            ("quantized, 8 bits", put(_0_4=mx.array(7)), "7 bits in groups of 32"),
            ("quantized, 8 bits", put(_0_4=mx.array(4)), "arrays are not 4 bits in groups of 32"),
            ("quantized, 8 bits", drop("0.0.2"), "should be three tensors"),
            ("quantized, 8 bits", put(_0_1_2=mx.zeros((2, 3, 4, 2))), "arrays do not match"),
            ("quantized, 8 bits", put(_0_0_0=mx.zeros((2, 3, 11, 16))), "arrays are not 8 bits"),
            ("chunked", put(_0_4=mx.array(11)), "token 11 of 10 cannot be its first row"),
            ("chunked", put(_0_4=mx.array(-1)), "token -1 of 10"),
            ("chunked", put(_0_3=mx.array(0)), "cannot be its first row"),
            ("recurrent", put(_0_1=mx.array([65])), None),
            ("recurrent", drop("0.0.0"), "part 0 is missing"),
            ("concatenated", drop("0.1"), "does not have 2 parts"),
        ],
    )
    def test_parts_of_other_classes(
        self, name: str, edit: Any, reason: str | None, tmp_path: Path
    ) -> None:
        path = change(write_prompt_cache(tmp_path / "c", [FILLED[name]()]), edit)
        if reason is None:
            read_prompt_cache(path)
            return
        with pytest.raises(FileFormatError, match=reason):
            read_prompt_cache(path)

    @pytest.mark.parametrize("codes", [[-1], [128], [0.5], [[75]], list(range(1, 128)) * 2])
    def test_a_name_that_is_not_text(self, codes: list[Any], tmp_path: Path) -> None:
        path = write_prompt_cache(tmp_path / "g", [CacheList(feed(KVCache(), 2))])
        with pytest.raises(FileFormatError, match="one of its strings is damaged"):
            read_prompt_cache(change(path, put(_0_0_1=mx.array(codes))))


class TestEarlierGenerations:
    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        cache = [feed(KVCache(), 9), feed(RotatingKVCache(8), 9), slots(FILLED["recurrent"](), 0)]
        return write_prompt_cache(tmp_path / "old", cache, {"model": "m"}, generation="A")

    @pytest.mark.parametrize(
        ("edit", "reason"),
        [
            (drop("2.1"), "class 1 is missing"),
            (drop("2.2"), "names 2 caches and has parts of others"),
            (
                lambda arrays, header: header.pop("0.0"),
                r"layer 0 \(KVCache\): its header has fields",
            ),
            (drop("0.1"), r"layer 0 \(KVCache\): it does not have 2 tensors"),
            (put(_0_0="x"), r"layer 0 \(KVCache\): its header has fields"),
            (drop("0.1.4", "0.1.3"), r"layer 1 \(RotatingKVCache\): its header does not have 5"),
            (put(_0_1_0="one"), r"layer 1 \(RotatingKVCache\): 'one' should be a whole number"),
            (put(_0_1_0="9" * 30), "should be a whole number"),
            (put(_0_1_3="-5"), r"layer 1 \(RotatingKVCache\)"),
            (put(_0_3="extra"), "names 3 caches and has parts of others"),
        ],
    )
    def test_parts_that_do_not_fit(self, edit: Any, reason: str, old: Path) -> None:
        with pytest.raises(FileFormatError, match=reason):
            read_prompt_cache(change(old, edit))

    def test_windows_of_two_generations_in_one_file(self, tmp_path: Path) -> None:
        cache = [feed(RotatingKVCache(8), 9), feed(RotatingKVCache(8), 9)]
        path = write_prompt_cache(tmp_path / "old", cache, generation="A")
        with pytest.raises(FileFormatError, match=r"layer 1 \(RotatingKVCache\): .* 5 fields"):
            read_prompt_cache(change(path, drop("0.1.4")))

    def test_a_list_of_unknown_caches(self, tmp_path: Path) -> None:
        path = tmp_path / "c.safetensors"
        arrays = {"0.0": mx.zeros((1, 1, 2, 4)), "0.1": mx.zeros((1, 1, 2, 4))}
        mx.save_safetensors(str(path), arrays, {"0.0": "", "2.0": "CacheList"})
        with pytest.raises(FileFormatError, match=r"without saying what is in it until 0\.31\.0"):
            read_prompt_cache(path)


class TestDroppedChunks:
    """Before 0.32, ChunkedKVCache was written without its offset, its padding included."""

    def _file(
        self, path: Path, *, start: int, rows: int, tokens: int | None, chunk: int = 8
    ) -> Path:
        mx.random.seed(0)
        arrays = {f"0.{part}": mx.random.normal((1, 1, rows, 4)) for part in range(2)}
        header = {"0.0.0": str(chunk), "0.0.1": str(start), "2.0": "ChunkedKVCache"}
        if tokens is not None:
            arrays |= {f"1.{part}": mx.random.normal((1, 1, tokens, 4)) for part in range(2)}
            header |= {"0.1": "", "2.1": "KVCache"}
        mx.save_safetensors(str(path), arrays, header)
        return path

    def test_placed_by_the_full_layers(self, tmp_path: Path) -> None:
        path = self._file(tmp_path / "c.safetensors", start=8, rows=8, tokens=13)
        layer = read_prompt_cache(path).cache[0]
        assert isinstance(layer, ChunkedKVCache)
        assert (layer.offset, layer.start_position, layer.chunk_size) == (13, 8, 8)
        keys, _ = layer.keys_and_values()
        assert mx.array_equal(keys, mx.load(str(path))["0.0"][:, :, :5])

    def test_nothing_to_place_it_by(self, tmp_path: Path) -> None:
        path = self._file(tmp_path / "c.safetensors", start=8, rows=8, tokens=None)
        with pytest.raises(FileFormatError, match="nothing in the file says how many it saw"):
            read_prompt_cache(path)

    @pytest.mark.parametrize("tokens", [7, 17])
    def test_rows_that_do_not_fit(self, tokens: int, tmp_path: Path) -> None:
        path = self._file(tmp_path / "c.safetensors", start=8, rows=8, tokens=tokens)
        with pytest.raises(FileFormatError, match="its 8 rows do not fit the"):
            read_prompt_cache(path)

    def test_rows_that_the_model_still_needs(self, tmp_path: Path) -> None:
        # The next token, number 15, looks back to number 8.
        path = self._file(tmp_path / "c.safetensors", start=9, rows=8, tokens=15)
        with pytest.raises(FileFormatError, match="the model still needs some of them"):
            read_prompt_cache(path)

    def test_not_yet_dropped(self, tmp_path: Path) -> None:
        path = self._file(tmp_path / "c.safetensors", start=0, rows=8, tokens=None)
        assert read_prompt_cache(path).cache[0].offset == 8
