"""Affine groups with 16-bit scales: the arithmetic of `q8` and `q4`, on the device."""

from __future__ import annotations

import mlx.core as mx

from kvq.codec.coding import LayerCoding

#: Below these a step would be lost to flushing of subnormal numbers.
_SMALLEST_STEP = {mx.bfloat16: 2.0**-100, mx.float16: 2.0**-24}


def quantize(x: mx.array, coding: LayerCoding) -> tuple[mx.array, mx.array, mx.array]:
    """Codes (uint32), scales and biases of `x` [..., dim], as the package's docstring lays out.

    No value is off by more than half its scale, up to the rounding of float32 and of `x.dtype`.
    """
    scale_dtype = mx.float16 if x.dtype == mx.float16 else mx.bfloat16
    levels = 2**coding.bits - 1
    x = x.astype(mx.float32)
    if coding.padded_dim > coding.dim:  # with the last value, which cannot widen a group's range
        padding = [(0, 0)] * (x.ndim - 1) + [(0, coding.padded_dim - coding.dim)]
        x = mx.pad(x, padding, mode="edge")
    rows = x.shape[:-1]
    groups = x.reshape(*rows, coding.padded_dim // coding.group_size, coding.group_size)

    # The bias is rounded down and the step up, so that bias .. bias + levels * step covers the
    # group whatever 16 bits can hold; only then are the codes found, with what a reader will see.
    bias = _round_down(groups.min(axis=-1, keepdims=True), scale_dtype)
    span = groups.max(axis=-1, keepdims=True) - bias.astype(mx.float32)
    step = -_round_down(-mx.maximum(span / levels, _SMALLEST_STEP[scale_dtype]), scale_dtype)
    codes = mx.round((groups - bias.astype(mx.float32)) / step.astype(mx.float32))
    codes = mx.clip(codes, 0, levels).astype(mx.uint8).reshape(*rows, coding.padded_dim)
    return _pack(codes, coding.bits), step.squeeze(-1), bias.squeeze(-1)


def dequantize(
    codes: mx.array, scales: mx.array, biases: mx.array, coding: LayerCoding, dtype: mx.Dtype
) -> mx.array:
    """Values [..., dim] of `dtype`."""
    # In float32, and rounded once: in bfloat16 the product and the sum would each be rounded.
    x = mx.dequantize(
        codes,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=coding.group_size,
        bits=coding.bits,
    )
    return x[..., : coding.dim].astype(dtype)


def _pack(codes: mx.array, bits: int) -> mx.array:
    """uint8 codes [..., n] as little-endian uint32 words [..., n * bits / 32]."""
    if bits == 4:
        pairs = codes.view(mx.uint16)  # the second code of a pair is the high byte
        codes = ((pairs | (pairs >> 4)) & 0xFF).astype(mx.uint8)
    return codes.view(mx.uint32)


def _round_down(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """The largest value of the 16-bit float `dtype` that is not above the float32 `x`."""
    near = x.astype(dtype)
    # Ordered like integers: one more bit pattern is one step away from zero.
    bits = near.view(mx.uint16)
    below = mx.where(bits == 0, 0x8001, mx.where(bits < 0x8000, bits - 1, bits + 1))
    lower = below.astype(mx.uint16).view(dtype)
    return mx.where(near.astype(mx.float32) > x, lower, near)
