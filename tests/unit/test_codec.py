"""Codecs at rest: bounds on the error and on the bytes, for every shape and dtype."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq import codec
from kvq.errors import UnsupportedFormat, UsageError

mx = pytest.importorskip("mlx.core")

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
#: Half a unit in the last place, relative: what rounding to the dtype may add.
ROUNDING = {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def records(shape: tuple[int, ...], dtype: str, seed: int = 0, scale: float = 1.0) -> mx.array:
    """Like keys: some channels far from zero, so that groups have wide ranges."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) + 4 * rng.normal(size=(*shape[:2], 1, shape[3]))
    return mx.array((x * scale).astype(np.float32)).astype(DTYPES[dtype])


def as_numpy(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), dtype=np.float64)


def stored_bits(parts: dict[str, mx.array]) -> int:
    return 8 * sum(part.nbytes for part in parts.values())


def largest_errors(x: np.ndarray, coding: codec.LayerCoding, ulp: float) -> np.ndarray:
    """Half a step for every value, where a step covers the group and what 16 bits round."""
    starts = np.arange(0, coding.dim, coding.group_size)
    low, high = (f.reduceat(x, starts, axis=-1) for f in (np.minimum, np.maximum))
    span = (high - low) + np.abs(low) * ulp
    step = span / (2**coding.bits - 1) * (1 + ulp) + 2.0**-23
    return np.repeat(step, np.diff([*starts, coding.dim]), axis=-1) / 2


def half_steps(parts: dict[str, mx.array], coding: codec.LayerCoding) -> np.ndarray:
    """Half a step of each value as it is stored, in the units of its channel."""
    steps = np.repeat(as_numpy(parts["s"]), coding.group_size, axis=-1)[..., : coding.dim]
    return steps * as_numpy(parts["d"]) / 2 * (1 + 2.0**-16)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["q8", "q4"]),
    dtype=st.sampled_from(sorted(DTYPES)),
    dim=st.sampled_from([0, 1, 8, 16, 32, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512]),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 20),
    raw_tokens=st.integers(0, 6),
    scale=st.sampled_from([1e-4, 1.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_no_value_is_off_by_more_than_half_a_step(
    name, dtype, dim, layers, heads, tokens, raw_tokens, scale, seed
):
    x = records((layers, heads, tokens, dim), dtype, seed, scale)
    chosen = codec.get(name)
    coding = chosen.plan(dim)
    parts = chosen.encode(x, raw_tokens=raw_tokens)
    back = chosen.decode(parts, dim=dim, dtype=DTYPES[dtype])
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    was, now = as_numpy(x), as_numpy(back)
    if coding.exact:
        assert np.array_equal(was, now)
        return
    sink = min(raw_tokens, tokens)
    if coding.channels and tokens - sink < 8:
        sink = tokens
    assert np.array_equal(was[:, :, :sink], now[:, :, :sink])
    if sink >= tokens:
        return
    error = np.abs(was - now)[:, :, sink:]
    rest = was[:, :, sink:]
    if coding.channels:
        allowed = half_steps(parts, coding)
    else:
        allowed = largest_errors(rest, coding, 2.0**-10 if dtype == "float16" else 2.0**-7)
    allowed += np.abs(rest).max(initial=0) * ROUNDING[dtype]
    assert (error <= allowed).all()


@pytest.mark.parametrize("name", ["q8", "q4"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1000.5, 3e-30, 2.0**-24])
def test_a_constant_group_comes_back(name, value):
    x = mx.full((1, 1, 16, 64), value)
    parts = codec.get(name).encode(x)
    back = codec.get(name).decode(parts, dim=64, dtype=mx.float32)
    assert mx.abs(back - x).max().item() <= abs(value) * 2**-15 + 2.0**-100


def test_a_channel_that_hardly_moves_keeps_its_place():
    x = records((1, 1, 64, 64), "float32")
    x[..., 7] = 1000.3 + 0.01 * x[..., 7]
    back = codec.get("q4").decode(codec.get("q4").encode(x), dim=64, dtype=mx.float32)
    error = mx.abs(back - x).max(axis=2)[0, 0]
    assert error[7].item() < 0.5  # the mean is rounded to 16 bits; the deviation covers that
    assert error.max().item() < 1.0


def test_the_codes_of_q8_are_those_that_mlx_reads():
    x = records((2, 2, 5, 128), "bfloat16")
    parts = codec.get("q8").encode(x)
    coding = codec.get("q8").plan(128)
    how = {"group_size": coding.group_size, "bits": coding.bits}
    back = mx.dequantize(parts["q"], parts["s"], parts["b"], **how)
    assert mx.abs(back - x).max().item() < 0.2


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_layout_can_be_decoded_without_mlx(dtype):
    x = records((1, 2, 12, 80), dtype)
    for name in ("q8", "q4"):
        parts = codec.get(name).encode(x)
        coding = codec.get(name).plan(80)
        q = np.array(parts["q"]).astype(np.uint64)
        s, b = as_numpy(parts["s"]), as_numpy(parts["b"])
        i = np.arange(80)
        bit = i * coding.bits
        codes = (q[..., bit // 32] >> (bit % 32).astype(np.uint64)) & (2**coding.bits - 1)
        group = i // coding.group_size
        expected = codes * s[..., group] + b[..., group]
        if coding.channels:
            expected = expected * as_numpy(parts["d"]) + as_numpy(parts["m"])
        back = codec.get(name).decode(parts, dim=80, dtype=mx.float32)
        np.testing.assert_allclose(as_numpy(back), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("name", "most"), [("q8", 0.72), ("q4", 0.5)])
def test_errors_are_below_those_of_mlx_quantize_on_bfloat16(name, most):
    x = records((2, 2, 256, 256), "bfloat16")
    bits = codec.get(name).bits
    q = mx.quantize(x, group_size=64, bits=bits)
    theirs = mx.dequantize(*q, group_size=64, bits=bits)
    ours = codec.get(name).decode(codec.get(name).encode(x), dim=256, dtype=mx.bfloat16)
    rms = [np.sqrt(np.mean((as_numpy(y) - as_numpy(x)) ** 2)) for y in (ours, theirs)]
    assert rms[0] < most * rms[1]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("name", "most"), [("q8", 8.6), ("q4", 4.6)])
def test_bits_a_value_of_a_gemma_cache(name, most, dtype):
    first, next_ = (records((3, 1, 256, 256), dtype, seed) for seed in (1, 2))
    chosen = codec.get(name)
    bits = stored_bits(chosen.encode(first, raw_tokens=codec.SINK_TOKENS))
    bits += 7 * stored_bits(chosen.encode(next_))
    assert bits / (8 * first.size) <= most
    assert chosen.bits_per_value(256) == {"q8": 8.5, "q4": 4.375}[name]


@pytest.mark.parametrize(
    ("dim", "q8", "q4", "padded_dim"),
    [
        (32, 32, 32, 32),
        (64, 64, 64, 64),
        (80, 32, 32, 96),
        (96, 32, 32, 96),
        (104, 64, 128, 128),
        (112, 64, 128, 128),
        (128, 64, 128, 128),
        (160, 32, 32, 160),
        (192, 64, 64, 192),
        (512, 64, 128, 512),
    ],
)
def test_the_plan_of_a_dim(dim, q8, q4, padded_dim):
    for name, size in (("q8", q8), ("q4", q4)):
        coding = codec.get(name).plan(dim)
        assert (coding.codec, coding.group_size, coding.padded_dim) == (name, size, padded_dim)
        assert bool(coding.note) == (padded_dim != dim)
        assert coding.channels == (name == "q4")


@pytest.mark.parametrize("dim", [1, 8, 16, 40, 48, 72])
def test_dims_that_no_group_fits_stay_raw_and_say_so(dim):
    coding = codec.get("q8").plan(dim)
    assert (coding.codec, coding.exact) == ("raw", True)
    assert str(dim) in coding.note
    assert codec.get("q8").bits_per_value(dim, raw_bits=32) == 32


def test_padding_is_told_in_bits():
    assert codec.get("q8").bits_per_value(80) == pytest.approx(10.8)
    assert codec.get("q4").bits_per_value(80) == pytest.approx(6.0 + 0.125)
    assert codec.get("raw").bits_per_value(80) == 16


def test_the_group_size_nearest_to_the_preferred_one_wins():
    assert codec.resolve_group_size(128) == 64
    assert codec.resolve_group_size(128, preferred=128) == 128
    assert codec.resolve_group_size(128, preferred=96) == 64
    assert codec.resolve_group_size(128, 96) == 32
    assert codec.resolve_group_size(80, 128) is None
    assert codec.resolve_group_size(0) is None


def test_a_coding_survives_its_header():
    for name in codec.names():
        for dim in (0, 8, 64, 80):
            coding = codec.get(name).plan(dim)
            again = codec.LayerCoding.from_json(json.loads(json.dumps(coding.as_json())))
            assert again == coding


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"codec": "q8"},
        {"codec": "q8", "dim": "much"},
        {"codec": "zip", "dim": 64},
        {"codec": "raw", "dim": 64, "bits": 8},
        {"codec": "raw", "dim": -1},
        {"codec": "raw", "dim": 64, "channels": True},
        {"codec": "q8", "dim": 64, "bits": 8, "group_size": 0, "padded_dim": 64},
        {"codec": "q8", "dim": 64, "bits": 8, "group_size": 48, "padded_dim": 96},
        {"codec": "q8", "dim": 64, "bits": 3, "group_size": 64, "padded_dim": 64},
        {"codec": "q8", "dim": 65, "bits": 8, "group_size": 64, "padded_dim": 64},
    ],
)
def test_a_coding_that_makes_no_sense_is_refused(facts):
    with pytest.raises(UnsupportedFormat):
        codec.LayerCoding.from_json(facts)


@pytest.mark.parametrize("name", ["q8", "q4"])
def test_parts_that_do_not_fit_their_coding_are_refused(name):
    chosen = codec.get(name)
    coding = chosen.plan(64)
    parts = chosen.encode(records((1, 1, 20, 64), "float16"), raw_tokens=4)
    codec.decode(parts, coding, mx.float16)
    other = chosen.encode(records((1, 2, 20, 64), "float16"), raw_tokens=4)
    faults = [
        {},
        {"": parts["sink"]},
        parts | {"": parts["sink"]},
        {name: part for name, part in parts.items() if name != "b"},
        parts | {"q": parts["q"][..., :4]},
        parts | {"s": parts["s"][:, :, :1]},
        parts | {"q": other["q"]},
        parts | {"sink": parts["sink"][0]},
        parts | {"sink": parts["sink"][..., :32]},
        parts | {"sink": other["sink"]},
        codec.get("q4" if name == "q8" else "q8").encode(records((1, 1, 20, 64), "float16")),
    ]
    if name == "q4":
        faults += [parts | {"m": parts["sink"]}, {k: v for k, v in parts.items() if k != "d"}]
    for fault in faults:
        with pytest.raises(UnsupportedFormat):
            codec.decode(fault, coding, mx.float16)


def test_few_tokens_stay_raw_rather_than_pay_for_their_channels():
    x = records((1, 1, 11, 64), "bfloat16")
    parts = codec.get("q4").encode(x, raw_tokens=4)
    assert list(parts) == ["sink"]
    assert mx.array_equal(codec.get("q4").decode(parts, dim=64, dtype=mx.bfloat16), x).item()
    assert {"q", "m", "d"} < codec.get("q4").encode(x, raw_tokens=3).keys()


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(codec.names()),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    raw_tokens=st.integers(0, 4),
)
def test_tokens_can_be_cut_off_the_parts(name, cut, raw_tokens):
    x = records((2, 1, 20, 64), "float32")
    start, stop = cut
    chosen = codec.get(name)
    parts = chosen.encode(x, raw_tokens=raw_tokens)
    taken = codec.take(parts, start, stop)
    if start == stop:
        assert taken == {}
        return
    whole = chosen.decode(parts, dim=64, dtype=mx.float32)
    assert mx.array_equal(
        chosen.decode(taken, dim=64, dtype=mx.float32), whole[:, :, start:stop]
    ).item()


def test_raw_is_the_array_itself():
    x = records((1, 1, 3, 40), "bfloat16")
    parts = codec.get("raw").encode(x, raw_tokens=4)
    assert list(parts) == [""]
    assert parts[""] is x


def test_names_go_from_exact_to_lossy():
    assert codec.names() == ("raw", "q8", "q4")
    assert [codec.get(name).exact for name in codec.names()] == [True, False, False]
    bits = [codec.get(name).bits_per_value(128) for name in codec.names()]
    assert bits == sorted(bits, reverse=True)


def test_an_unknown_codec_is_a_usage_error():
    with pytest.raises(UsageError, match="raw, q8, q4"):
        codec.get("q5")


def test_stored_codes_make_a_live_cache_that_attends_to_what_was_stored():
    from mlx_lm.models.cache import make_prompt_cache
    from zoo import ARCHITECTURES

    from kvq.cache.convert import from_codes
    from kvq.cache.trial import rounded
    from kvq.codec.live import codes, mismatch

    for name in ("llama-64", "gemma3_text", "gemma3_text-32"):
        model = next(arch for arch in ARCHITECTURES if arch.name == name).build()
        plain = make_prompt_cache(model)
        mx.eval(model(mx.array([list(range(20))]), cache=plain))
        chosen = codec.get("q8")
        caches = []
        for index, cache in enumerate(plain):
            window = hasattr(cache, "max_size")
            rows = cache.keys_and_values()
            coding = chosen.plan(rows[0].shape[-1])
            assert mismatch(coding, coding) == ""
            how = {"bits": coding.bits, "group_size": coding.group_size}
            parts = [chosen.encode(x, raw_tokens=0 if window else 4) for x in rows]
            triples = [codes(part, coding, mx.float32) for part in parts]
            caches.append(from_codes(cache, *triples, tokens=20, **how))
            for part, (q, s, _) in zip(parts, triples, strict=True):
                assert mx.array_equal(q[:, :, q.shape[2] - part["q"].shape[2] :], part["q"]).item()
                assert s.dtype == mx.float32
            plain[index] = rounded(cache, **how)
            whole = [mx.dequantize(*triple, **how) for triple in triples]
            plain[index].keys, plain[index].values = whole
            plain[index].offset = 20
        for ids in ([1, 2, 3], [4], [5]):
            got = model(mx.array([ids]), cache=caches)[:, -1]
            expected = model(mx.array([ids]), cache=plain)[:, -1]
            # New rows are quantized as they come: where BLAS kernels round a value otherwise that
            # lies between two codes, one code differs by one step.
            assert mx.abs(got - expected).max().item() <= 1e-3 * mx.abs(expected).max().item()


def test_codes_that_cannot_be_attended_to_say_why():
    from kvq.codec.live import mismatch

    q8, q4, raw = codec.get("q8"), codec.get("q4"), codec.get("raw")
    assert mismatch(raw.plan(64), q8.plan(64)) == "the keys are stored raw"
    assert mismatch(q8.plan(64), q8.plan(16)) == "the values are stored raw"
    assert mismatch(q8.plan(80), q8.plan(80)) == "the keys are padded from 80 to 96"
    assert "groups of 64, values 8 bits in groups of 32" in mismatch(q8.plan(64), q8.plan(32))
    assert mismatch(q8.plan(64), q4.plan(64)) == "the channels of the values are standardized"


@pytest.mark.parametrize("name", ["q8", "q4"])
def test_the_largest_float16_does_not_become_infinite(name: str) -> None:
    coder = codec.get(name)
    rows = mx.random.normal((1, 1, 64, 64)).astype(mx.float16)
    rows[0, 0, 5, 7], rows[0, 0, 6, 7] = 65504.0, -65504.0
    decoded = coder.decode(coder.encode(rows, raw_tokens=0), dim=64, dtype=mx.float16)
    assert mx.all(mx.isfinite(decoded)).item()


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX calls a compiler for it on a CPU")
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", ["q8", "q4"])
def test_in_few_kernels_as_on_a_gpu_every_bit_is_the_same(name, dtype, dim, monkeypatch) -> None:
    from kvq.codec import affine

    one = codec.get(name)
    x = records((2, 3, 20, dim), dtype)
    parts = one.encode(x, raw_tokens=4)
    back = one.decode(parts, dim=dim, dtype=DTYPES[dtype])
    monkeypatch.setattr(affine, "_fused", lambda tokens, *steps: affine._compiled(*steps))
    fused = one.encode(x, raw_tokens=4)
    assert fused.keys() == parts.keys()
    for part in parts:
        assert mx.array_equal(fused[part], parts[part]), part
    assert mx.array_equal(one.decode(parts, dim=dim, dtype=DTYPES[dtype]), back)


def test_only_whole_blocks_are_compiled_and_only_for_a_gpu(monkeypatch) -> None:
    from kvq.codec import affine

    compiled: list[object] = []
    monkeypatch.setattr(affine, "_compiled", lambda *steps: compiled.append(steps))
    for device, tokens, expected in (("cpu", 256, 0), ("gpu", 255, 0), ("gpu", 256, 1)):
        kind = getattr(mx, device)
        monkeypatch.setattr(mx, "default_device", lambda kind=kind: mx.Device(kind))
        affine._fused(tokens, affine._standardize)
        assert len(compiled) == expected, (device, tokens)
