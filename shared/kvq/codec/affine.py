"""Affine groups with 16-bit scales, and standardized channels: the arithmetic, on the device."""

from __future__ import annotations

import mlx.core as mx

from kvq.codec.coding import LayerCoding

#: Below these a step would be lost to flushing of subnormal numbers.
_SMALLEST_STEP = {mx.bfloat16: 2.0**-100, mx.float16: 2.0**-24}


def scale_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The 16-bit float that scales of records of `dtype` are stored in."""
    return mx.float16 if dtype == mx.float16 else mx.bfloat16


def quantize(
    x: mx.array, coding: LayerCoding, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Codes (uint32), scales and biases of `x` [..., dim], as the package's docstring lays out.

    Scales and biases are of the 16-bit float `dtype`. No value is off by more than half its
    scale, up to the rounding of float32.
    """
    levels = 2**coding.bits - 1
    x = x.astype(mx.float32)
    if coding.padded_dim > coding.dim:  # with the last value, which cannot widen a group's range
        padding = [(0, 0)] * (x.ndim - 1) + [(0, coding.padded_dim - coding.dim)]
        x = mx.pad(x, padding, mode="edge")
    rows = x.shape[:-1]
    groups = x.reshape(*rows, coding.padded_dim // coding.group_size, coding.group_size)

    # The bias is rounded down and the step up, so that bias .. bias + levels * step covers the
    # group whatever 16 bits can hold; only then are the codes found, with what a reader will see.
    # So none of them is below 0 or above the levels.
    bias = _round_down(groups.min(axis=-1, keepdims=True), dtype)
    span = groups.max(axis=-1, keepdims=True) - bias.astype(mx.float32)
    step = _round_up(mx.maximum(span / levels, _SMALLEST_STEP[dtype]), dtype)
    # Half a step up, and what is behind the point cut off: one pass less than rounding.
    wide = step.astype(mx.float32)
    codes = (groups - (bias.astype(mx.float32) - wide / 2)) / wide
    codes = codes.astype(mx.uint8).reshape(*rows, coding.padded_dim)
    return _pack(codes, coding.bits), step.squeeze(-1), bias.squeeze(-1)


def dequantize(
    codes: mx.array, scales: mx.array, biases: mx.array, coding: LayerCoding
) -> mx.array:
    """float32 values [..., dim]."""
    x = mx.dequantize(
        codes,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=coding.group_size,
        bits=coding.bits,
    )
    return x[..., : coding.dim]


def standardize(x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """`x` [layers, heads, tokens, dim] with each channel moved and scaled to mean 0, deviation 1.

    Returns it in float32, with the means and deviations [layers, heads, 1, dim] as 16-bit floats;
    computed with these as rounded.
    """
    dtype = scale_dtype(x.dtype)
    x = x.astype(mx.float32)
    mean = x.mean(axis=2, keepdims=True).astype(dtype)
    # From the rounded mean, so that a constant channel cannot end up far from 0 in deviations.
    centered = x - mean.astype(mx.float32)
    square = mx.square(centered).mean(axis=2, keepdims=True)
    deviation = _round_up(mx.maximum(mx.sqrt(square), _SMALLEST_STEP[dtype]), dtype)
    return centered / deviation.astype(mx.float32), mean, deviation


def unstandardize(x: mx.array, mean: mx.array, deviation: mx.array) -> mx.array:
    """The float32 values that `standardize` was given, up to the quantization in between."""
    return x * deviation.astype(mx.float32) + mean.astype(mx.float32)


def _pack(codes: mx.array, bits: int) -> mx.array:
    """uint8 codes [..., n] as little-endian uint32 words [..., n * bits / 32]."""
    if bits == 4:
        pairs = codes.view(mx.uint16)  # the second code of a pair is the high byte
        codes = ((pairs | (pairs >> 4)) & 0xFF).astype(mx.uint8)
    return codes.view(mx.uint32)


def _round_up(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """The smallest value of the 16-bit float `dtype` that is not below the float32 `x`."""
    return -_round_down(-x, dtype)


def _round_down(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """The largest value of the 16-bit float `dtype` that is not above the float32 `x`."""
    near = x.astype(dtype)
    # Ordered like integers: one more bit pattern is one step away from zero.
    bits = near.view(mx.uint16)
    below = mx.where(bits == 0, 0x8001, mx.where(bits < 0x8000, bits - 1, bits + 1))
    lower = below.astype(mx.uint16).view(dtype)
    return mx.where(near.astype(mx.float32) > x, lower, near)
