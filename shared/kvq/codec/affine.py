"""Affine groups with 16-bit scales, and standardized channels: the arithmetic, on the device.

Each function is a run of elementwise steps around a reduction or two. A GPU gets those of whole
blocks as few kernels (`mx.compile`); MLX's CPU build would start a C++ compiler for that, and runs
them as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kvq.codec.coding import BLOCK_TOKENS, LayerCoding

#: Below these a step would be lost to flushing of subnormal numbers.
_SMALLEST_STEP = {mx.bfloat16: 2.0**-100, mx.float16: 2.0**-24}

_FLOAT16_MAX = 65504.0


def scale_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The 16-bit float that scales of records of `dtype` are stored in."""
    return mx.float16 if dtype == mx.float16 else mx.bfloat16


def quantize(
    x: mx.array, coding: LayerCoding, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Codes (uint32), scales and biases of `x` [..., dim], as the package's docstring lays out.

    Scales and biases are of the 16-bit float `dtype`. No value is off by more than half its
    scale, up to the rounding of float32. Lazy.
    """
    if coding.padded_dim > coding.dim:  # with the last value, which cannot widen a group's range
        padding = [(0, 0)] * (x.ndim - 1) + [(0, coding.padded_dim - coding.dim)]
        x = mx.pad(x, padding, mode="edge")
    q, s, b = _fused(x.shape[-2], _quantize, coding, dtype)(x)
    return q, s, b


def dequantize(
    codes: mx.array,
    scales: mx.array,
    biases: mx.array,
    coding: LayerCoding,
    dtype: mx.Dtype,
    channels: Sequence[mx.array] = (),
) -> mx.array:
    """Values [..., dim], computed in float32 and rounded once, to `dtype`. Lazy.

    `channels` are the mean and the deviation that `standardize` gave, where it was called.
    """
    steps = _fused(codes.shape[-2], _dequantize, coding, dtype)
    x: mx.array = steps(codes, scales, biases, *channels)
    return x


def standardize(x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """`x` [layers, heads, tokens, dim] with each channel moved and scaled to mean 0, deviation 1.

    Returns it in float32, with the means and deviations [layers, heads, 1, dim] as 16-bit floats;
    computed with these as rounded. Lazy.
    """
    standard, mean, deviation = _fused(x.shape[-2], _standardize)(x)
    return standard, mean, deviation


def _quantize(
    coding: LayerCoding, dtype: mx.Dtype, x: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    levels = 2**coding.bits - 1
    rows = x.shape[:-1]
    groups = x.reshape(*rows, coding.padded_dim // coding.group_size, coding.group_size)
    low = groups.min(axis=-1, keepdims=True).astype(mx.float32)
    high = groups.max(axis=-1, keepdims=True).astype(mx.float32)

    # The bias is rounded down and the step up, so that bias .. bias + levels * step covers the
    # group whatever 16 bits can hold; only then are the codes found, with what a reader will see.
    # So none of them is below 0 or above the levels.
    bias = _round_down(low, dtype)
    span = high - bias.astype(mx.float32)
    step = _round_up(mx.maximum(span / levels, _SMALLEST_STEP[dtype]), dtype)
    # Half a step up, and what is behind the point cut off: one pass less than rounding.
    wide = step.astype(mx.float32)
    codes = (groups.astype(mx.float32) - (bias.astype(mx.float32) - wide / 2)) / wide
    codes = codes.astype(mx.uint8).reshape(*rows, coding.padded_dim)
    return _pack(codes, coding.bits), step.squeeze(-1), bias.squeeze(-1)


def _dequantize(
    coding: LayerCoding,
    dtype: mx.Dtype,
    codes: mx.array,
    scales: mx.array,
    biases: mx.array,
    *channels: mx.array,
) -> mx.array:
    rows = codes.shape[:-1]
    x = _unpack(codes, coding.bits).reshape(*scales.shape, coding.group_size).astype(mx.float32)
    x = x * scales.astype(mx.float32)[..., None] + biases.astype(mx.float32)[..., None]
    x = x.reshape(*rows, coding.padded_dim)[..., : coding.dim]
    if channels:
        mean, deviation = channels
        x = x * deviation.astype(mx.float32) + mean.astype(mx.float32)
    if dtype == mx.float16:  # half a step above its largest number it would be infinite
        x = mx.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX)
    return x.astype(dtype)


def _standardize(x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    dtype = scale_dtype(x.dtype)
    x = x.astype(mx.float32)
    mean = x.mean(axis=2, keepdims=True).astype(dtype)
    # From the rounded mean, so that a constant channel cannot end up far from 0 in deviations.
    centered = x - mean.astype(mx.float32)
    square = mx.square(centered).mean(axis=2, keepdims=True)
    deviation = _round_up(mx.maximum(mx.sqrt(square), _SMALLEST_STEP[dtype]), dtype)
    return centered / deviation.astype(mx.float32), mean, deviation


def _fused(tokens: int, steps: Callable[..., Any], *how: Any) -> Callable[..., Any]:
    """`steps` with its first arguments, in few kernels where a GPU gets whole blocks.

    What is compiled stays for good, for each shape, and a mean over another number of tokens is
    another kernel: too much for the odd lengths at the ends of prompts.
    """
    if tokens != BLOCK_TOKENS or mx.default_device().type == mx.cpu:
        return functools.partial(steps, *how)
    return _compiled(steps, *how)


@functools.cache
def _compiled(steps: Callable[..., Any], *how: Any) -> Callable[..., Any]:
    return mx.compile(functools.partial(steps, *how))


def _pack(codes: mx.array, bits: int) -> mx.array:
    """uint8 codes [..., n] as little-endian uint32 words [..., n * bits / 32]."""
    if bits == 4:
        pairs = codes.view(mx.uint16)  # the second code of a pair is the high byte
        codes = ((pairs | (pairs >> 4)) & 0xFF).astype(mx.uint8)
    return codes.view(mx.uint32)


def _unpack(words: mx.array, bits: int) -> mx.array:
    """The uint8 codes [..., n * 32 / bits] of little-endian uint32 words [..., n]."""
    codes = words.view(mx.uint8)
    if bits == 4:
        pairs = codes.astype(mx.uint16)
        codes = ((pairs | (pairs << 4)) & 0x0F0F).view(mx.uint8)
    return codes


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
