"""How keys and values rest on disk: `raw` (as computed), `q8` and `q4` (affine groups).

A codec works on one stack of records `x` of shape [layers, heads, tokens, dim] and gives named
parts. All but "m" and "d" have their tokens on axis 2, so that a reader can cut them (`take`):

    raw    ""      x itself
    q8 q4  "sink"  [layers, heads, r, dim], the dtype of x: the first r tokens, kept as computed,
                   because attention sinks do not bear quantization. Absent when r is 0.
           "q"     [layers, heads, tokens - r, padded_dim * bits / 32], uint32
           "s"     [layers, heads, tokens - r, padded_dim / group_size]: scales, 2 bytes each
           "b"     the same shape and dtype: biases. Where r is all tokens, only "sink" is there.
    q4     "m"     [layers, heads, 1, dim]: the mean of each channel over the coded tokens
           "d"     the same shape: its deviation; 2 bytes each. Fewer than 8 tokens stay raw.

What was done to an array is its `LayerCoding`, which stands in the header of the file; a reader
needs nothing else. To decode without MLX: value `i` of a row (`i` < padded_dim) has the code
`(q[i * bits // 32] >> (i * bits % 32)) & (2**bits - 1)`, and is, in float32,
`code * s[i // group_size] + b[i // group_size]`, with "channels" in the coding times `d[i]` plus
`m[i]`; it is rounded once, to the dtype of x. Values from `dim` on are padding. `s`, `b`, `m` and
`d` are float16 when x is float16, else bfloat16.

Why so, measured on Gemma 3 270M in float32 (mean divergence of predictions, in nats, over 288
tokens of prose and code behind 768 tokens that went through the codec):

                                             4 bits            8 bits
    mx.quantize, scales as they are          0.118 (5.0 bits)  0.0005 (9.0 bits)
    mx.quantize, scales rounded to 2 bytes   0.123 (4.5 bits)  0.0013 (8.5 bits)
    codes found with the rounded scales      0.263 (4.5 bits)  0.0005 (8.5 bits)   q8
    the same on standardized channels        0.010 (4.4 bits)  0.00003 (8.6 bits)  q4

A few channels of keys are far larger than the rest. In one group with them, all others share a
code or two at 4 bits; standardized, they do not. Codes found with the very scales that a
reader sees are off by at most half a step. `q8` leaves the channels as they are, because then its
codes are those that MLX's quantized attention reads: they can be attended to as they are
(`kvq.codec.live`), and lose nothing that matters at 8 bits.

This package imports without MLX; only `encode`, `decode` and `take` of arrays need it.
"""

from __future__ import annotations

from kvq.codec.coding import GROUP_SIZES, SINK_TOKENS, LayerCoding, resolve_group_size
from kvq.codec.parts import decode, take
from kvq.codec.registry import Codec, get, names

__all__ = [
    "GROUP_SIZES",
    "SINK_TOKENS",
    "Codec",
    "LayerCoding",
    "decode",
    "get",
    "names",
    "resolve_group_size",
    "take",
]
