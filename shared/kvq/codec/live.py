"""Stored codes as they are, for a cache that stays quantized: no decoding and coding again."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from kvq.codec import affine
from kvq.codec.coding import LayerCoding
from kvq.codec.parts import check

#: Codes (uint32), scales and biases, as `mx.quantize` gives them.
Codes = tuple[mx.array, mx.array, mx.array]


def mismatch(keys: LayerCoding, values: LayerCoding) -> str:
    """Why keys and values that are coded so cannot be attended to as they are; "" if they can."""
    for name, coding in (("keys", keys), ("values", values)):
        if coding.exact:
            return f"the {name} are stored raw"
        if coding.channels:
            return f"the channels of the {name} are standardized"
        if coding.padded_dim != coding.dim:
            return f"the {name} are padded from {coding.dim} to {coding.padded_dim}"
    if (keys.bits, keys.group_size) != (values.bits, values.group_size):
        return (
            f"keys have {keys.bits} bits in groups of {keys.group_size}, "
            f"values {values.bits} bits in groups of {values.group_size}"
        )
    return ""


def codes(parts: Mapping[str, mx.array], coding: LayerCoding, dtype: mx.Dtype) -> Codes:
    """The codes of parts whose `coding` has no `mismatch`: [layers, heads, tokens, n]. Lazy.

    Sinks, which are stored as computed, are quantized like the rest, for a live cache has one
    form for all of its tokens. Scales and biases are of `dtype`, the model's, which holds them
    exactly. Raises UnsupportedFormat when the parts are not those that `coding` describes.
    """
    check(parts, coding)
    pieces: list[Codes] = []
    if "sink" in parts:
        pieces.append(affine.quantize(parts["sink"], coding, affine.scale_dtype(dtype)))
    if "q" in parts:
        pieces.append((parts["q"], parts["s"], parts["b"]))
    q, s, b = (mx.concatenate(list(same), axis=2) for same in zip(*pieces, strict=True))
    return q, s.astype(dtype), b.astype(dtype)
