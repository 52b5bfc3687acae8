"""A block file is whole and what it says it is, or it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from safetensors import safe_open

from kvq.errors import DamagedFile, UnsupportedFormat
from kvq.store.blockfile import (
    MAX_HEADER,
    BlockMeta,
    Tensor,
    check_data,
    read_data,
    read_header,
    read_into,
    write_block,
)
from kvq.store.keys import ROOT, as_ids

IDS = as_ids([5, 6, 7])
KEYS = np.arange(12, dtype=np.float32).reshape(1, 2, 3, 2)
VALUES = -KEYS.astype(np.float16)
META = BlockMeta(
    record="kv", space="ab" * 20, parent=ROOT, token_ids=IDS, start=512, groups=({"leaves": [0]},)
)


def tensor(name: str, array: np.ndarray) -> Tensor:
    dtype = {"float32": "F32", "float16": "F16"}[array.dtype.name]
    return Tensor(name=name, dtype=dtype, shape=array.shape, data=array.tobytes())


TENSORS = [tensor("0.k", KEYS), tensor("0.v", VALUES)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "block.safetensors"
    write_block(path, META, TENSORS)
    return path


def read(path: Path) -> bytes:
    """Everything that a reader relies on; raises what reading raises."""
    header = read_header(path)
    check_data(header)
    return read_data(header).tobytes()


def test_what_was_written_is_read(path):
    header = read_header(path)
    assert header.meta.record == "kv"
    assert header.meta.token_ids.tolist() == [5, 6, 7]
    assert (header.meta.start, header.meta.end, header.meta.low) == (512, 515, 0)
    assert header.meta.parent == ROOT
    assert header.meta.groups == ({"leaves": [0]},)
    assert header.file_bytes == path.stat().st_size
    assert list(header.tensors) == ["0.k", "0.v"]
    assert header.tensors["0.v"].shape == (1, 2, 3, 2)
    assert read_data(header).tobytes() == KEYS.tobytes() + VALUES.tobytes()


def test_it_is_an_ordinary_safetensors_file(path):
    with safe_open(path, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("0.k"), KEYS)
        assert json.loads(file.metadata()["kvq"])["start"] == 512
    arrays, metadata = mx.load(str(path), return_metadata=True)
    np.testing.assert_array_equal(np.array(arrays["0.v"]), VALUES)
    assert set(metadata) == {"kvq", "data", "head"}


def test_tensors_begin_at_a_multiple_of_eight(path):
    assert read_header(path).data_start % 8 == 0


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_is_noticed(path, flip):
    raw = path.read_bytes()
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= flip
        path.write_bytes(damaged)
        with pytest.raises(DamagedFile):
            read(path)
    path.write_bytes(raw)
    read(path)


def test_every_cut_is_noticed(path):
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(DamagedFile):
            read(path)


def test_more_at_the_end_is_noticed(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DamagedFile, match="size"):
        read_header(path)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 4096,
        b"\xff" * 4096,
        b"{}",
        bytes(range(155, 255)),
        (MAX_HEADER + 1).to_bytes(8, "little") + b"{}",
        (1 << 63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (24).to_bytes(8, "little") + b'{"__metadata__": {"a":1}}'[:24],
    ],
)
def test_garbage_is_refused(path, raw):
    path.write_bytes(raw)
    with pytest.raises(DamagedFile):
        read_header(path)


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "none.safetensors")


def rewrite(path: Path, **changes: object) -> None:
    """The file with other facts in its header, and the header's digest made to hold."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + length])
    described = json.loads(head["__metadata__"]["kvq"])
    for name, value in changes.items():
        if name in described:
            described[name] = value
        else:
            head["0.k"][name] = value
    head["__metadata__"] |= {"kvq": json.dumps(described), "head": "0" * 32}
    blank = json.dumps(head, separators=(",", ":")).encode()
    digits = xxhash.xxh3_128_hexdigest(blank).encode()
    sealed = blank.replace(b'"head":"' + b"0" * 32, b'"head":"' + digits)
    path.write_bytes(len(sealed).to_bytes(8, "little") + sealed + raw[8 + length :])


def test_other_writers_may_lay_out_the_header_as_they_like(path):
    before = read(path)
    rewrite(path)
    assert read(path) == before


def test_a_newer_format_is_not_guessed_at(path):
    rewrite(path, format=2)
    with pytest.raises(UnsupportedFormat, match="upgrade kvq"):
        read_header(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": -1},
        {"start": "0"},
        {"low": 1.5},
        {"low": True},
        {"tokens": "AAA="},
        {"tokens": "not base 64"},
        {"parent": "xyz"},
        {"groups": None},
        {"format": "1"},
        {"data_offsets": [0, 40]},
        {"data_offsets": [4, 52]},
        {"data_offsets": [-48, 0]},
        {"data_offsets": [0]},
        {"shape": [-1, -2, 3, 2]},
        {"shape": [1, 2, 3, 3]},
        {"shape": [2**62, 2**62]},
        {"dtype": "F8"},
        {"dtype": ["F32"]},
    ],
    ids=str,
)
def test_a_header_that_makes_no_sense_is_refused(path, changes):
    rewrite(path, **changes)
    with pytest.raises(DamagedFile, match="cannot be read"):
        read_header(path)


def test_a_block_of_nothing_but_tokens(tmp_path):
    path = tmp_path / "empty.safetensors"
    write_block(path, META, [])
    assert read(path) == b""
    with safe_open(path, framework="numpy") as file:
        assert list(file.keys()) == []


def test_a_long_header_is_read_whole(tmp_path):
    path = tmp_path / "many.safetensors"
    many = [tensor(f"{number}.k", KEYS) for number in range(300)]
    write_block(path, META, many)
    header = read_header(path)
    assert header.data_start > 8192
    assert len(header.tensors) == 300
    assert read(path) == KEYS.tobytes() * 300


def test_reading_into_many_small_views(path):
    header = read_header(path)
    room = bytearray(header.data_bytes)
    view = memoryview(room)
    read_into(header, [view[i : i + 5] for i in range(0, len(room), 5)])
    assert bytes(room) == KEYS.tobytes() + VALUES.tobytes()


def test_a_short_read_is_completed(path, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:3]], at))
    assert read_data(read_header(path)).tobytes() == KEYS.tobytes() + VALUES.tobytes()


@pytest.mark.parametrize("reader", [read_data, check_data])
def test_a_replaced_file_is_not_a_damaged_one(path, reader):
    header = read_header(path)
    write_block(path, META, [tensor("0.k", KEYS + 1), tensor("0.v", VALUES)])
    with pytest.raises(FileNotFoundError, match="replaced"):
        reader(header)
    write_block(path, META, [])
    with pytest.raises(FileNotFoundError, match="replaced"):
        reader(header)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        reader(header)
