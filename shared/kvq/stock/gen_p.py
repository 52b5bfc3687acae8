"""Generation P (up to mlx-lm 0.19.0): tensors `{layer}_keys` and `{layer}_values`, nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from kvq.stock import build
from kvq.stock.faults import Fault
from kvq.stock.fields import rows
from kvq.stock.tree import in_order

_NAME = re.compile(r"(0|[1-9][0-9]{0,8})_(keys|values)", re.ASCII)
#: What mlx-lm 0.19.0 always kept of the beginning when the user set a maximum size.
_KEEP = 4


def is_flat(names: Iterable[str]) -> bool:
    """Whether tensors of these names are a file of this generation."""
    names = list(names)
    return bool(names) and all(_NAME.fullmatch(name) for name in names)


def restore(arrays: Mapping[str, mx.array], header: Mapping[str, str]) -> list[Any]:
    """The caches: full ones, or windows where the header has a maximum size. Raises Fault."""
    layers: dict[int, dict[str, mx.array]] = {}
    for name, array in arrays.items():
        layer, part = name.split("_")
        layers.setdefault(int(layer), {})[part] = array
    size = header.get("max_kv_size", "")
    max_size = int(size) if re.fullmatch(r"[0-9]{1,18}", size, re.ASCII) else None
    return [
        _cache(layer.get("keys"), layer.get("values"), max_size)
        for layer in in_order(layers, "layer")
    ]


def _cache(keys: mx.array | None, values: mx.array | None, max_size: int | None) -> Any:
    if keys is None or values is None:
        raise Fault("a layer has keys or values, but not both")
    count = rows(keys)
    if max_size is None:
        return build.kv_cache(keys, values, count)
    if count >= max_size:
        raise Fault(
            f"its window of {max_size} tokens is full, and such a file does not say how many came "
            "before; process the prompt again"
        )
    return build.rotating_cache(keys, values, count, _KEEP, max_size, count)
