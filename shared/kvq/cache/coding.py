"""Coding rows as they rest: each whole block by itself, many blocks in one go."""

from __future__ import annotations

import mlx.core as mx

from kvq.codec import Codec
from kvq.store.keys import BLOCK


def encode_blocks(codec: Codec, rows: mx.array, sinks: int = 0) -> list[dict[str, mx.array]]:
    """The codec's parts of each block of `rows` [layers, heads, blocks * 256, dim]. Lazy.

    The first `sinks` tokens stay as computed. However many blocks there are, the device has the
    same few steps to do.
    """
    if sinks and not codec.exact:
        first = codec.encode(rows[:, :, :BLOCK], raw_tokens=sinks)
        return [first, *encode_blocks(codec, rows[:, :, BLOCK:])]
    layers, heads, tokens, _ = rows.shape
    count = tokens // BLOCK
    if count == 0:
        return []
    parts = codec.encode(as_heads(rows), raw_tokens=0)
    blocks = {
        name: mx.contiguous(part.reshape(layers, heads, count, *part.shape[2:]).moveaxis(2, 0))
        for name, part in parts.items()
    }
    return [{name: part[number] for name, part in blocks.items()} for number in range(count)]


def as_heads(rows: mx.array) -> mx.array:
    """[layers, heads, blocks * 256, dim] as if each block were a head: [.., 256, dim]."""
    layers, heads, tokens, dim = rows.shape
    return rows.reshape(layers, heads * (tokens // BLOCK), BLOCK, dim)
