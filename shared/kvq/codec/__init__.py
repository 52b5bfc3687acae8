"""How keys and values rest on disk: `raw` (as computed), `q8` and `q4` (affine groups).

A codec works on one stack of records `x` of shape [layers, heads, tokens, dim] and gives named
parts, each with its tokens on axis 2, so that a reader can cut tokens off any part (`take`):

    raw    ""      x itself
    q8 q4  "sink"  [layers, heads, r, dim], the dtype of x: the first r tokens, kept as computed,
                   because attention sinks do not bear quantization. Absent when r is 0.
           "q"     [layers, heads, tokens - r, padded_dim * bits / 32], uint32
           "s"     [layers, heads, tokens - r, padded_dim / group_size]: scales, 2 bytes each
           "b"     the same shape and dtype: biases. "q", "s", "b" are absent when tokens is r.

What was done to an array is its `LayerCoding`, which stands in the header of the file; a reader
needs nothing else. To decode without MLX: value `i` of a row (`i` < padded_dim) has the code
`(q[i * bits // 32] >> (i * bits % 32)) & (2**bits - 1)`, and is
`float32(code) * s[i // group_size] + b[i // group_size]`, rounded once to the dtype of x; values
from `dim` on are padding. `s` and `b` are float16 when x is float16, else bfloat16.

The codes are those that MLX's own quantized kernels read, so a decoded part can also be attended
to as it is (`kvq.codec.live`). They are not computed with `mx.quantize`, which finds the codes
with scales that it then rounds to 16 bits: here they are found with the rounded scales, so that
no value is off by more than half a step. At 8 bits on bfloat16 keys this takes a third off the
error, for no byte. It also lets float32 models store scales of 2 bytes.

This package imports without MLX; only `encode`, `decode` and `take` of arrays need it.
"""

from __future__ import annotations

from kvq.codec.coding import GROUP_SIZES, SINK_TOKENS, LayerCoding, resolve_group_size
from kvq.codec.registry import Codec, decode, get, names, take

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
