"""Layers of like shape, stacked: what the tensors of a block file are.

A group holds leaves with the same window whose keys and values have the same heads, dims, dtypes.
Its keys and its values are one array each, [layers, heads, tokens, dim], so a file has few large
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvq.cache.dtypes import dtype_of
from kvq.codec import LayerCoding
from kvq.store.space import Leaf


@dataclass(frozen=True, kw_only=True)
class Side:
    """The keys or the values of a group."""

    heads: int
    dim: int
    dtype: str

    @property
    def mlx_dtype(self) -> mx.Dtype:
        return dtype_of(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Group:
    """`leaves` are indices into the space's leaves, in the order in which they are stacked."""

    record: str
    leaves: tuple[int, ...]
    #: Newest and first tokens that a restore needs; 0 and 0 for all (see Leaf).
    window: int
    keep: int
    keys: Side
    values: Side

    def sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        return ("k", self.keys), ("v", self.values)


def groups_of(leaves: Sequence[Leaf]) -> tuple[Group, ...]:
    """The groups of a model, in the order of their first leaf."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.keys is not None and leaf.values is not None:
            keys = Side(heads=leaf.keys[0], dim=leaf.keys[1], dtype=leaf.keys_dtype)
            values = Side(heads=leaf.values[0], dim=leaf.values[1], dtype=leaf.values_dtype)
            alike = (leaf.record, leaf.window, leaf.keep, keys, values)
            found.setdefault(alike, []).append(index)
    return tuple(
        Group(
            record=record, leaves=tuple(indices), window=window, keep=keep, keys=keys, values=values
        )
        for (record, window, keep, keys, values), indices in found.items()
    )


def tensor_name(group: int, side: str, part: str) -> str:
    """Such as `0.k` (raw) or `0.k.q`."""
    return f"{group}.{side}.{part}" if part else f"{group}.{side}"


def describe_group(group: Group, codings: Mapping[str, LayerCoding]) -> dict[str, Any]:
    """The group's entry in a block file's header."""
    return {
        "leaves": list(group.leaves),
        **{
            side: {"heads": one.heads, "dtype": one.dtype, "coding": codings[side].as_json()}
            for side, one in group.sides()
        },
    }
