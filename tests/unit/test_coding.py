"""Blocks that are coded in one go are what each is by itself, to the bit."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvq import codec as codecs
from kvq.cache.coding import encode_blocks
from kvq.codec import SINK_TOKENS
from kvq.store.keys import BLOCK


@pytest.mark.parametrize("codec", codecs.names())
@pytest.mark.parametrize("sinks", [0, SINK_TOKENS])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("dim", [64, 80])
def test_many_blocks_are_as_one_after_the_other(
    codec: str, sinks: int, dtype: mx.Dtype, dim: int
) -> None:
    coder = codecs.get(codec)
    rows = mx.random.normal((3, 2, 4 * BLOCK, dim)).astype(dtype)
    blocks = encode_blocks(coder, rows, sinks)
    assert len(blocks) == 4
    for number, found in enumerate(blocks):
        block = rows[:, :, number * BLOCK : (number + 1) * BLOCK]
        expected = coder.encode(block, raw_tokens=sinks if number == 0 else 0)
        assert found.keys() == expected.keys()
        for part, array in expected.items():
            assert found[part].shape == array.shape
            assert mx.array_equal(found[part], array), (number, part)


def test_layers_whose_values_have_no_width_and_no_blocks_at_all() -> None:
    raw = codecs.get("raw")
    blocks = encode_blocks(raw, mx.zeros((2, 1, 2 * BLOCK, 0)))
    assert [block[""].shape for block in blocks] == [(2, 1, BLOCK, 0)] * 2
    assert encode_blocks(raw, mx.zeros((2, 1, 0, 8))) == []
