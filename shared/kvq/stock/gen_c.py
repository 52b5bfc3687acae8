"""Generation C (mlx-lm 0.32.0 and later).

The header is the flattened list [metadata, classes, scalars]. All of a cache's `state` is in
tensors, numbers, strings and None too; `scalars` names those after an empty first entry, which is
also how this generation is told from the earlier ones. mlx-lm writes buffers with their padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from kvq.stock import build
from kvq.stock.faults import Fault
from kvq.stock.fields import clip
from kvq.stock.gen_c_write import SCALARS
from kvq.stock.tree import in_order, unflatten


def restore(name: Any, state: Any) -> Any:
    """The cache of class `name` with this state. Raises Fault."""
    if not isinstance(name, str) or name not in READERS:
        raise Fault(f"{clip(name)} is none of mlx-lm's caches")
    return READERS[name](state)


def unpack(arrays: Mapping[str, mx.array], header: Mapping[str, str]) -> list[Any]:
    """The states of the caches, in order, with the scalars back in place. Raises Fault."""
    values: dict[str, Any] = dict(arrays)
    prefix = f"{SCALARS}."
    entries = {
        key.removeprefix(prefix): value for key, value in header.items() if key.startswith(prefix)
    }
    for entry in in_order(unflatten(entries), "scalar")[1:]:
        if not isinstance(entry, list) or len(entry) != 2:
            raise Fault("its list of scalars is damaged")
        name, kind = entry
        if not isinstance(values.get(name), mx.array) or kind not in _SCALARS:
            raise Fault(f"its list of scalars has {clip(name)} as {clip(kind)}")
        values[name] = _SCALARS[kind](values[name])
    return in_order(unflatten(values), "layer")


def _string(array: mx.array) -> str:
    if array.ndim != 1 or array.size > 200 or not mx.issubdtype(array.dtype, mx.integer):
        raise Fault("one of its strings is damaged")
    codes: Any = array.tolist()
    if not all(0 <= code < 128 for code in codes):
        raise Fault("one of its strings is damaged")
    return "".join(map(chr, codes))


def _scalar(array: mx.array) -> Any:
    if array.size != 1:
        raise Fault("one of its numbers is damaged")
    return array.item()


_SCALARS: dict[str, Callable[[mx.array], Any]] = {
    "scalar": _scalar,
    "string": _string,
    "none": lambda array: None,
}


def _fields(state: Any, *kinds: Callable[[Any], Any]) -> list[Any]:
    if not isinstance(state, list) or len(state) != len(kinds):
        raise Fault(f"its state does not have {len(kinds)} parts")
    return [kind(part) for kind, part in zip(kinds, state, strict=True)]


def _array(part: Any) -> mx.array | None:
    if part is not None and not isinstance(part, mx.array):
        raise Fault("a part of its state should be a tensor")
    return part


def _whole(part: Any) -> int:
    if type(part) is not int:
        raise Fault("a part of its state should be a whole number")
    return part


def _slots(part: Any) -> list[mx.array | None]:
    if not isinstance(part, list):
        raise Fault("a part of its state should be a list of tensors")
    return [_array(slot) for slot in part]


def _triple(part: Any) -> list[mx.array] | None:
    if part is None:
        return None
    slots = _slots(part)
    if len(slots) != 3 or any(slot is None for slot in slots):
        raise Fault("a part of its state should be three tensors")
    return [slot for slot in slots if slot is not None]


def _cache_list(state: Any) -> Any:
    if not isinstance(state, list):
        raise Fault("its state is not a list of caches")
    children = []
    for child in state:
        if not isinstance(child, list) or len(child) != 2:
            raise Fault("its state is not a list of caches")
        children.append(restore(child[1], child[0]))
    return build.cache_list(children)


READERS: dict[str, Callable[[Any], Any]] = {
    "KVCache": lambda state: build.kv_cache(*_fields(state, _array, _array, _whole)),
    "RotatingKVCache": lambda state: build.rotating_cache(
        *_fields(state, _array, _array, _whole, _whole, _whole, _whole)
    ),
    "QuantizedKVCache": lambda state: build.quantized_cache(
        *_fields(state, _triple, _triple, _whole, _whole, _whole)
    ),
    "ArraysCache": lambda state: build.arrays_cache(*_fields(state, _slots, _array, _array)),
    "ChunkedKVCache": lambda state: build.chunked_cache(
        *_fields(state, _array, _array, _whole, _whole, _whole)
    ),
    "ConcatenateKVCache": lambda state: build.concatenate_cache(*_fields(state, _array, _array)),
    "CacheList": _cache_list,
}
