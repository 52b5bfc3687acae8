from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.store.keys import (
    BLOCK,
    ROOT,
    as_ids,
    chain_keys,
    child_key,
    common_prefix,
    first_code,
    pack,
    unpack,
)
from kvq.store.layout import BlockName, block_path, node_dir, parse_name, parse_stem

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(token_lists)
def test_ids_survive_packing(ids: list[int]) -> None:
    assert unpack(pack(ids)).tolist() == ids
    assert pack(ids) == b"".join(token.to_bytes(4, "little") for token in ids)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16, ">u4"])
def test_arrays_of_any_integer_are_token_ids(dtype: str) -> None:
    ids = as_ids(np.array([1, 2, 300], dtype))
    assert ids.dtype == np.uint32
    assert pack(ids) == pack([1, 2, 300])


def test_token_ids_are_not_copied_without_need():
    ids = np.arange(5, dtype=np.uint32)
    assert as_ids(ids) is ids or as_ids(ids).base is ids


@pytest.mark.parametrize("bad", [[-1], [2**32], [2**70], [0.5], [True], ["1"], [[1, 2]], [None]])
def test_what_is_no_token_id_is_refused(bad: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids must be"):
        as_ids(bad)


def test_unpacking_needs_whole_tokens():
    with pytest.raises(ValueError, match="multiple"):
        unpack(b"12345")


def test_a_key_digests_parent_and_tokens():
    key = child_key(ROOT, [1, 2])
    assert key == blake2b(bytes(20) + b"\1\0\0\0\2\0\0\0", digest_size=20).digest()
    assert child_key(key, [3]) != child_key(ROOT, [3])


def test_equal_keys_mean_equal_prefixes():
    ids = np.arange(3 * BLOCK + 10, dtype=np.uint32)
    keys = list(chain_keys(ids))
    assert len(keys) == 3
    other = ids.copy()
    other[BLOCK] += 1
    shared = [a == b for a, b in zip(keys, chain_keys(other), strict=True)]
    assert shared == [True, False, False]
    assert keys[1] == child_key(child_key(ROOT, ids[:BLOCK]), ids[BLOCK : 2 * BLOCK])


@given(token_lists, token_lists)
def test_names_show_how_many_tokens_can_be_shared(a: list[int], b: list[int]) -> None:
    ours, theirs = as_ids(a), as_ids(b)
    shared = common_prefix(ours, theirs)
    assert ours[:shared].tolist() == theirs[:shared].tolist()
    code, other = first_code(ours), first_code(theirs)
    assert len(code) == min(len(a), 16)
    assert code[:shared] == other[:shared]


def test_common_prefix_ends_at_the_first_difference():
    assert common_prefix(as_ids([1, 2, 3]), as_ids([1, 2, 4, 5])) == 2
    assert common_prefix(as_ids([1, 2]), as_ids([1, 2, 4])) == 2
    assert common_prefix(as_ids([]), as_ids([1])) == 0


@pytest.mark.parametrize("record", ["kv", "window", "state", "logits"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("n", [1, 15, 16, BLOCK])
def test_names_can_be_read_back(record: str, checkpoint: bool, n: int) -> None:
    block = BlockName.of(ROOT, np.arange(n, dtype=np.uint32))
    parsed = parse_name(ROOT, block.file(record, checkpoint=checkpoint))
    assert parsed is not None
    assert (parsed.block, parsed.record, parsed.checkpoint) == (block, record, checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        ".tmp-1-abc.safetensors",
        "space.json",
        f"{'0' * 40}.257.abc.safetensors",
        f"{'0' * 40}.0.abc.safetensors",
        f"{'0' * 40}.12.abc.rows.safetensors",
        f"{'0' * 39}.12.abc.safetensors",
        f"{'A' * 40}.12.abc.safetensors",
        f"{'0' * 40}.12.abc.safetensors.part",
        f".gc-{'0' * 40}.12.abc.safetensors",
    ],
)
def test_other_files_are_no_blocks(name: str) -> None:
    assert parse_name(ROOT, name) is None


def test_stems_are_checked():
    block = BlockName.of(ROOT, as_ids([1, 2]))
    assert parse_stem(ROOT, block.stem) == block
    for bad in (f"{block.stem}.window", "../../etc/passwd", "", f"{block.stem}.ckpt"):
        with pytest.raises(ValueError, match="not the name of a block"):
            parse_stem(ROOT, bad)


def test_a_block_lies_in_its_parents_directory():
    block = BlockName.of(b"\xab" * 20, as_ids([7]))
    space = Path("/kv/spaces/s")
    assert node_dir(space, block.parent) == space / "nodes" / "ab" / ("ab" * 20)
    assert block_path(space, block, "state") == node_dir(space, block.parent) / block.file("state")
