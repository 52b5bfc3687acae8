"""KVCacheContainer: each layer that can run quantized does, the others say why they do not."""

from __future__ import annotations

import copy
import gc
import re
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core")

from mlx_lm.models.cache import (  # noqa: E402
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from zoo import ARCHITECTURES  # noqa: E402

from kvq.cache import live, probe  # noqa: E402
from kvq.cache.container import KVCacheContainer  # noqa: E402
from kvq.cache.convert import blank, put  # noqa: E402
from kvq.cache.leaves import iter_leaves  # noqa: E402
from kvq.cache.rotating import QuantizedRotatingKVCache  # noqa: E402
from kvq.cache.trial import rounded  # noqa: E402
from kvq.errors import UsageError  # noqa: E402

BY_NAME = {arch.name: arch for arch in ARCHITECTURES}
PROMPT = [(7 * i * i + 3 * i + 5) % 128 for i in range(21)]
LATER = [[3, 1, 4], [1], [5]]


def fed(model, container, ids=PROMPT):
    """Feed `ids` and return the container, evaluated."""
    mx.eval(model(mx.array([ids]), cache=container), [cache.state for cache in container])
    return container


def filled(name):
    model = BY_NAME[name].build()
    return model, fed(model, KVCacheContainer.make(model))


def states(report):
    return "".join(row.state[0] for row in report)


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=str)
def test_every_model_goes_on_and_its_active_layers_attend_to_what_they_hold(arch):
    model = arch.build()
    container = fed(model, KVCacheContainer.make(model))
    plain = copy.deepcopy(container)
    report = container.maybe_quantize(8)

    assert [row.path for row in report] == [path for path, _ in iter_leaves(container)]
    assert all(row.reason for row in report if row.state == "skipped")
    assert "pending" not in {row.state for row in report}
    for row in report:
        if row.state == "active":
            how = {"group_size": row.group_size, "bits": row.bits}
            leaf = dict(iter_leaves(plain))[row.path]
            put(plain, row.path, rounded(leaf, **how))
    for ids in LATER:
        got = model(mx.array([ids]), cache=container)[:, -1]
        expected = model(mx.array([ids]), cache=plain)[:, -1]
        scale = mx.abs(expected).max().item()
        assert mx.abs(got - expected).max().item() <= 2e-3 * scale


@pytest.mark.parametrize(
    ("name", "expected", "reason"),
    [
        ("gemma3_text", "aaaa", "groups of 32"),
        ("gpt_oss", "ssss", "does not support attention sinks"),
        ("deepseek_v3", "ss", "has no attribute 'swapaxes'"),
        ("gemma2", "ss", r"expand_dims\(\)"),
        ("gemma4_text", "aass", "scaled_dot_product_attention"),
        ("llama4", "sssa", "chunked attention"),
        ("falcon_h1", "sasa", "recurrent state"),
        ("qwen3_next", "sssa", "recurrent state"),
        ("llama-80", "ss", r"no group size \(32, 64, 128\) divides head dim 80"),
        ("mamba2", "ss", "recurrent state"),
        ("afm7", "as", "has no attribute 'shape'"),
        # Scales its queries in place, twice: wrong without an error.
        ("iquestloopcoder", "ssss", "off by|incompatible"),
        # Attends sparsely to long contexts, with masks that the quantized kernel does not take.
        ("minimax_m3_vl", "ass", "after 16384 tokens"),
    ],
)
def test_what_runs_quantized_and_why_the_rest_does_not(name, expected, reason):
    _model, container = filled(name)
    report = container.maybe_quantize(8)
    assert states(report) == expected
    assert container.report == report
    assert any(row.reason for row in report)
    assert any(re.search(reason, row.reason) for row in report)
    for row in report:
        assert (row.group_size is not None) == (row.state == "active")


def test_a_layer_is_converted_once_and_for_every_holder():
    _model, container = filled("llama-64")
    holder = container
    container.maybe_quantize(8)
    layers = list(holder)
    assert {type(layer) for layer in layers} == {QuantizedKVCache}
    container.maybe_quantize(8)
    assert all(a is b for a, b in zip(holder, layers, strict=True))


def test_a_nested_cache_is_exchanged_inside_its_list():
    _model, container = filled("falcon_h1")
    nested = container[0]
    container.maybe_quantize(8)
    assert container[0] is nested
    assert isinstance(nested, CacheList)
    assert [type(cache).__name__ for cache in nested.caches] == ["ArraysCache", "QuantizedKVCache"]
    assert [row.path for row in container.report] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row.layer for row in container.report] == [0, 0, 1, 1]


def test_layers_wait_until_they_hold_enough_tokens():
    model = BY_NAME["gemma3_text"].build()
    container = KVCacheContainer.make(model)
    assert states(container.maybe_quantize(8)) == "pppp"
    assert {row.reason for row in container.report} == {"waits for its first tokens"}
    fed(model, container)
    assert states(container.maybe_quantize(8, quantized_kv_start=22)) == "pppp"
    assert {row.reason for row in container.report} == {"waits for 22 tokens"}
    fed(model, container, [1])
    assert states(container.maybe_quantize(8, quantized_kv_start=22)) == "aaaa"


def test_once_settled_no_cache_is_looked_at(monkeypatch):
    _model, container = filled("gemma4_text")
    report = container.maybe_quantize(8)

    def never(*_):
        raise AssertionError("looked at a cache")

    monkeypatch.setattr(live, "iter_leaves", never)
    monkeypatch.setattr(live, "at", never)
    assert container.maybe_quantize(8) == report


def test_a_cache_that_is_put_in_later_is_looked_at():
    _model, container = filled("llama-64")
    exact = container[0]
    container.maybe_quantize(8)
    container[0] = exact
    assert states(container.maybe_quantize(8)) == "aa"
    assert isinstance(container[0], QuantizedKVCache)


def test_a_width_is_changed_only_for_layers_that_are_exact():
    _model, container = filled("llama-64")
    container.maybe_quantize(8)
    report = container.maybe_quantize(4)
    assert [row.bits for row in report] == [8, 8]
    assert {row.reason for row in report} == {"was quantized to 8 bits before"}


def test_without_a_model_nothing_is_converted():
    model, container = filled("gpt_oss")
    loose = KVCacheContainer(container)
    assert states(loose.maybe_quantize(8)) == "pppp"
    assert all("model" in row.reason for row in loose.report)
    assert states(loose.bind(model).maybe_quantize(8)) == "ssss"


def test_no_width_means_no_quantization():
    _model, container = filled("llama-64")
    assert container.maybe_quantize(None) == ()
    assert {type(cache) for cache in container} == {KVCache}


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_other_widths_of_mlx_run(bits):
    model, container = filled("gemma3_text")
    assert states(container.maybe_quantize(bits)) == "aaaa"
    for ids in LATER:
        fed(model, container, ids)


@pytest.mark.parametrize("asked", [{"bits": 7}, {"bits": 8, "group_size": 48}])
def test_what_mlx_does_not_have_is_refused(asked):
    _, container = filled("llama-64")
    with pytest.raises(UsageError):
        container.maybe_quantize(**asked)


def test_can_quantize_tells_whether_something_is_left():
    model = BY_NAME["gpt_oss"].build()
    container = KVCacheContainer.make(model)
    assert not container.can_quantize()
    fed(model, container)
    assert container.can_quantize()
    assert container.can_quantize(at=21)
    assert not container.can_quantize(at=22)
    container.maybe_quantize(8)
    assert not container.can_quantize()  # tried: its attention has sinks


def test_group_sizes():
    assert KVCacheContainer.is_valid_group_size(64, 128, 256)
    assert not KVCacheContainer.is_valid_group_size(64, 96)
    assert not KVCacheContainer.is_valid_group_size(48, 96)
    assert KVCacheContainer.resolve_group_size(96, 128) == 32
    assert KVCacheContainer.resolve_group_size(256, preferred=128) == 128
    assert KVCacheContainer.resolve_group_size(80) is None


def test_it_is_a_list_that_mlx_lm_takes_and_copies_share_the_model():
    model, container = filled("llama-64")
    container.tokens = 21
    assert len(container) == len(list(container)) == 2
    assert container.nbytes == sum(cache.nbytes for cache in container)
    deep = copy.deepcopy(container)
    shallow = copy.copy(container)
    assert deep.model is shallow.model is model
    assert deep.tokens == shallow.tokens == 21
    assert shallow[0] is container[0]
    assert deep[0] is not container[0]
    deep.maybe_quantize(8)
    assert {type(cache) for cache in container} == {KVCache}
    assert container.report == ()


def test_max_kv_size_makes_rotating_caches_that_can_be_quantized():
    model = BY_NAME["qwen3"].build()
    container = fed(model, KVCacheContainer.make(model, max_kv_size=8))
    assert {type(cache) for cache in container} == {RotatingKVCache}
    assert states(container.maybe_quantize(8)) == "aa"
    assert (container[0].max_size, container[0].keep) == (8, 4)
    for ids in LATER:
        fed(model, container, ids)


def test_memory_is_freed_at_once_and_answers_live_as_long_as_their_model():
    model, container = filled("llama-64")
    container.maybe_quantize(8)
    layer = weakref.ref(container[0])
    key = id(model)
    assert key in probe._answers
    gc.disable()
    try:
        del container
        assert layer() is None
    finally:
        gc.enable()
    del model
    gc.collect()
    assert key not in probe._answers


def test_the_model_is_tried_once(monkeypatch):
    model, container = filled("gemma3_text")
    other = fed(model, KVCacheContainer.make(model))
    container.maybe_quantize(8)
    monkeypatch.setattr(probe, "_probe", None)
    assert states(other.maybe_quantize(8)) == "aaaa"


@settings(max_examples=40, deadline=None)
@given(
    max_size=st.integers(2, 12),
    keep=st.integers(0, 4),
    start=st.integers(0, 20),
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    trims=st.sets(st.integers(0, 11)),
    bits=st.sampled_from([4, 8]),
)
def test_a_quantized_window_rotates_like_mlx_lms(max_size, keep, start, chunks, trims, bits):
    keep = min(keep, max_size - 1)
    how = {"group_size": 32, "bits": bits}
    mx.random.seed(start)
    plain = RotatingKVCache(max_size=max_size, keep=keep)
    if start:
        plain.update_and_fetch(*mx.random.normal((2, 1, 2, start, 32)))
    window = QuantizedRotatingKVCache.of(plain, **how)
    assert (window.keys is None) == (window.values is None) == window.empty() == (not start)
    plain = rounded(plain, **how)
    for index, count in enumerate(chunks):
        if index in trims and window.is_trimmable():
            assert plain.is_trimmable()
            assert window.trim(1) == plain.trim(1)
        for size in (None, max_size - 1):
            ours, theirs = (
                cache.make_mask(count, window_size=size or None) for cache in (window, plain)
            )
            assert type(ours) is type(theirs)
            if isinstance(ours, mx.array):
                assert mx.array_equal(ours, theirs).item()
            else:
                assert ours == theirs
        keys, values = mx.random.normal((2, 1, 2, count, 32))
        pairs = zip(
            window.update_and_fetch(keys, values), plain.update_and_fetch(keys, values), strict=True
        )
        for codes, expected in pairs:
            assert mx.array_equal(mx.dequantize(*codes, **how), expected).item()
        assert window.offset == plain.offset
        assert window.size() == plain.size()
    again = QuantizedRotatingKVCache.from_state(window.state)
    assert (again.bits, again.max_size, again.keep) == (bits, max_size, keep)
    assert window.nbytes < plain.nbytes
    for a, b in zip(again.keys_and_values(), window.keys_and_values(), strict=True):
        assert all(mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


def test_an_empty_prompt_cache_of_each_class_is_made_anew():
    for name in ("gemma3_text", "llama4", "falcon_h1", "mamba2"):
        caches = make_prompt_cache(BY_NAME[name].build())
        assert [type(blank(cache)) for cache in caches] == [type(c) for c in caches]
