"""Arrays whose memory nobody has filled."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import zoo

from kvq.cache import blank as module
from kvq.cache.blank import blank
from kvq.cache.leaves import leaf_caches
from kvq.model.loading import load
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store


@pytest.mark.parametrize("dtype", [mx.uint8, mx.uint16, mx.uint32, mx.bfloat16, mx.float32])
def test_arrays_have_their_shapes_and_hold_what_is_written_to_them(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FEWEST_BYTES", 0)
    shapes = [(1, 2, 256, 64), (3, 5), (1, 2, 256, 0), (7,)]
    arrays = blank(shapes, dtype)
    assert [tuple(array.shape) for array in arrays] == shapes
    assert {array.dtype for array in arrays} == {dtype}
    if dtype == mx.bfloat16:
        return  # NumPy has no view of it
    for number, array in enumerate(arrays):
        np.array(array, copy=False)[...] = number
    for number, array in enumerate(arrays):
        assert mx.all(array == number).item()


def test_a_few_bytes_are_zeros() -> None:
    (array,) = blank([(2, 3)], mx.uint32)
    assert array.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("codec", ["raw", "q8", "q4"])
@pytest.mark.parametrize("name", ["llama-64", "gemma3_text", "minicpm3"])
def test_a_restore_into_them_is_the_same(
    tmp_path: Path, name: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = zoo.by_name(name)
    llm = load(str(zoo.save_folder(architecture, tmp_path / "model")))
    store = Store.create(tmp_path / "store")
    ids = np.array(zoo.prompt(architecture, 600), np.uint32)
    Prefiller(store, llm, step=200).run(PrefillRequest(token_ids=ids, name="it", codec=codec))
    expected = store.match(llm.fingerprint, ids).load(llm.model)
    monkeypatch.setattr(module, "_FEWEST_BYTES", 0)
    found = store.match(llm.fingerprint, ids).load(llm.model)
    # The arrays themselves: what is behind the last token has to be zeros here too.
    pairs = list(zip(leaf_caches(expected), leaf_caches(found), strict=True))
    assert pairs
    for one, other in pairs:
        assert mx.array_equal(one.keys, other.keys)
        assert mx.array_equal(one.values, other.values)
