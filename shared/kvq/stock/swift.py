"""Files of mlx-swift-lm: the header of generation A, but always two levels of fields, and tensors
in one flat list for each cache. Python mlx-lm cannot read them.

A layer without tensors is an empty cache. Recurrent caches say which slots are present, and a
CacheList spells its children out: count, then (class, tensors, fields, the fields) for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import mlx.core as mx

from kvq.stock import build
from kvq.stock.faults import Fault, Mismatch
from kvq.stock.fields import Layer, arrays, integer, integers
from kvq.stock.gen_ab import Reader, chunked, read_child

#: With a vision model's state in the file, every class name and some keys begin with this.
STATE_PREFIX = "__mlx_lm_state_"

_ORIGINS = ("modelNative", "requested")


def _kv(layer: Layer) -> Any:
    if layer.info != [""]:
        raise Mismatch("its header has fields that this generation does not write")
    keys, values = _pair(layer)
    return build.kv_cache(keys, values, 0 if keys is None else keys.shape[2])


def _rotating(layer: Layer) -> Any:
    info = layer.info
    if isinstance(info, list) and len(info) == 6:
        # The last says who chose the window, the model or the user. mlx-lm has no use for it.
        *info, origin = info
        if origin not in _ORIGINS:
            raise Fault("the origin of its window is not one that mlx-swift-lm writes")
    keep, max_size, _step, offset, index = integers(info, 5)
    keys, values = _pair(layer)
    return build.rotating_cache(keys, values, offset, keep, max_size, index)


def _quantized(layer: Layer) -> Any:
    _step, offset, group_size, bits = integers(layer.info, 4)
    tensors = _tensors(layer)
    if not tensors:
        return build.quantized_cache(None, None, offset, group_size, bits)
    if len(tensors) == 4:
        raise Fault("it is quantized without biases, which mlx-lm's QuantizedKVCache cannot hold")
    tensors = arrays(tensors, 6)
    return build.quantized_cache(tensors[:3], tensors[3:], offset, group_size, bits)


def _recurrent(layer: Layer) -> Any:
    info, tensors = layer.info, _tensors(layer)
    if not isinstance(info, list) or not 1 <= len(info) <= 4:
        raise Mismatch("its header does not describe its slots")
    if info == [""]:  # written before the slots were
        return build.arrays_cache(tensors)
    if len(info) == 1:
        raise Mismatch("its header does not describe its slots")
    count, present = integer(info[0]), _integers(info[1])
    if sorted(set(present)) != present or len(present) != len(tensors):
        raise Fault(f"it has {len(tensors)} tensors for its slots {info[1]!r:.60}")
    if not len(present) <= count <= 1024 or (
        present and not 0 <= present[0] <= present[-1] < count
    ):
        raise Fault(f"slots {info[1]!r:.60} are not among its {count}")
    filled = dict(zip(present, tensors, strict=True))
    left_padding, lengths = (_counts(info, index) for index in (2, 3))
    return build.arrays_cache([filled.get(slot) for slot in range(count)], left_padding, lengths)


def _chunked(layer: Layer) -> Any:
    if layer.state:
        return chunked(layer)
    chunk_size, start = integers(layer.info, 2)
    return build.chunked_cache(None, None, start, chunk_size, start)


def _cache_list(layer: Layer) -> Any:
    if not isinstance(layer.info, list):
        raise Mismatch("its header does not describe its caches")
    fields, tensors = iter(layer.info), iter(_tensors(layer))
    children = []
    for _ in range(_take_count(fields)):
        (name,) = _take(fields, 1, "fields")
        tensor_count, field_count = _take_count(fields), _take_count(fields)
        info = _take(fields, field_count, "fields")
        state = _take(tensors, tensor_count, "tensors")
        children.append(read_child(READERS, layer.child(name, info, state)))
    if [*fields, *tensors]:
        raise Fault("it has more fields or tensors than its caches need")
    return build.cache_list(children)


def _pair(layer: Layer) -> tuple[mx.array | None, mx.array | None]:
    tensors = _tensors(layer)
    if not tensors:
        return None, None
    keys, values = arrays(tensors, 2)
    if keys.ndim != 4:
        raise Fault(f"a tensor has {keys.ndim} dimensions instead of 4")
    return keys, values


def _tensors(layer: Layer) -> list[mx.array]:
    return [] if layer.state is None else arrays(layer.state)


def _take(parts: Iterator[Any], count: int, what: str) -> list[Any]:
    taken = list(islice(parts, count))
    if len(taken) < count:
        raise Fault(f"its caches need more {what} than it has")
    return taken


def _take_count(fields: Iterator[Any]) -> int:
    count = integer(*_take(fields, 1, "fields"))
    if count < 0:
        raise Fault(f"{count} is not a count")
    return count


def _integers(text: Any) -> list[int]:
    if not isinstance(text, str):
        raise Mismatch("its header is nested in another way")
    return [integer(part) for part in text.split(",")] if text else []


def _counts(info: list[str], index: int) -> mx.array | None:
    if index >= len(info) or not info[index]:
        return None
    return mx.array(_integers(info[index]))


READERS: dict[str, Reader] = {
    "KVCache": _kv,
    "KVCacheSimple": _kv,
    "RotatingKVCache": _rotating,
    "QuantizedKVCache": _quantized,
    "ChunkedKVCache": _chunked,
    "MambaCache": _recurrent,
    "ArraysCache": _recurrent,
    "CacheList": _cache_list,
}
