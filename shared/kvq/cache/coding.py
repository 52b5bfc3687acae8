"""Coding rows as they rest: each whole block by itself, many blocks in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvq.cache.groups import describe_group, tensor_name
from kvq.cache.rows import GroupRows
from kvq.codec import SINK_TOKENS, Codec
from kvq.store.keys import BLOCK


def encode_files(
    codec: Codec, groups: Sequence[GroupRows], low: int, stop: int
) -> tuple[list[dict[str, Any]], list[dict[str, mx.array]]]:
    """Files of the rows of tokens [low, stop): what their groups are, each file's tensors. Lazy.

    Whole blocks give a file each, anything else is one file.
    """
    whole = low % BLOCK == 0 and stop % BLOCK == 0
    sinks = max(0, min(SINK_TOKENS, stop) - low)
    described: list[dict[str, Any]] = []
    files: list[dict[str, mx.array]] = [{} for _ in range((stop - low) // BLOCK if whole else 1)]
    for number, rows in enumerate(groups):
        codings = {}
        for (side, _), array in zip(rows.group.sides(), rows.between(low, stop), strict=True):
            codings[side] = codec.plan(array.shape[-1])
            if whole:
                pieces = encode_blocks(codec, array, sinks)
            else:
                pieces = [dict(codec.encode(array, raw_tokens=sinks))]
            for file, parts in zip(files, pieces, strict=True):
                file |= {tensor_name(number, side, part): data for part, data in parts.items()}
        described.append(describe_group(rows.group, codings))
    return described, files


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
