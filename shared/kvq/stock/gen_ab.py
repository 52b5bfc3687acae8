"""Generations A (mlx-lm 0.19.1 to 0.28.0) and B (0.28.1 to 0.31.3).

The header is the flattened list [info, metadata, classes]: for each cache its `meta_state`, in
strings, and its class name. The tensors are the flattened `state`, cut to the rows that count. In B
windows and quantized caches have one field fewer (no `step`), and from 0.31.0 on CacheList says
what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvq.stock import build
from kvq.stock.faults import Fault, Mismatch
from kvq.stock.fields import Layer, arrays, clip, integers, no_info, rows

Reader = Callable[[Layer], Any]


def _kv(layer: Layer) -> Any:
    no_info(layer.info)
    keys, values = arrays(layer.state, 2)
    return build.kv_cache(keys, values, rows(keys))


def _concatenate(layer: Layer) -> Any:
    no_info(layer.info)
    keys, values = arrays(layer.state, 2)
    return build.concatenate_cache(keys, values)


def _rotating_with_step(layer: Layer) -> Any:
    keep, max_size, _step, offset, index = integers(layer.info, 5)
    keys, values = arrays(layer.state, 2)
    return build.rotating_cache(keys, values, offset, keep, max_size, index)


def _rotating(layer: Layer) -> Any:
    keep, max_size, offset, index = integers(layer.info, 4)
    keys, values = arrays(layer.state, 2)
    return build.rotating_cache(keys, values, offset, keep, max_size, index)


def _quantized_with_step(layer: Layer) -> Any:
    _step, offset, group_size, bits = integers(layer.info, 4)
    return _quantized_pair(layer.state, offset, group_size, bits)


def _quantized(layer: Layer) -> Any:
    return _quantized_pair(layer.state, *integers(layer.info, 3))


def _quantized_pair(state: Any, offset: int, group_size: int, bits: int) -> Any:
    if not isinstance(state, list) or len(state) != 2:
        raise Mismatch("it does not have quantized keys and values")
    keys, values = arrays(state[0], 3), arrays(state[1], 3)
    return build.quantized_cache(keys, values, offset, group_size, bits)


def _recurrent(layer: Layer) -> Any:
    no_info(layer.info)
    return build.arrays_cache(arrays(layer.state))


def chunked(layer: Layer) -> Any:
    """A ChunkedKVCache; once its front has been dropped, only if the file allows to place it.

    Such a cache was written with the padding at its end and without its offset, and mlx-lm
    restores it at a wrong position. The full-attention layers beside it tell the offset.
    """
    chunk_size, start = integers(layer.info, 2)
    keys, values = arrays(layer.state, 2)
    if start == 0:
        return build.chunked_cache(keys, values, rows(keys), chunk_size, 0)
    offset = layer.position
    if offset is None:
        raise Fault("its first tokens were dropped, and nothing in the file says how many it saw")
    if not start <= offset <= start + rows(keys):
        raise Fault(
            f"its first {start} tokens were dropped, and its {rows(keys)} rows do not fit the "
            f"{offset} tokens of the other layers"
        )
    if chunk_size < 1 or start > offset // chunk_size * chunk_size:
        raise Fault(
            f"its first {start} tokens were dropped, and the model still needs some of them"
        )
    return build.chunked_cache(keys, values, offset, chunk_size, start)


def _untold_list(layer: Layer) -> Any:
    if layer.info == "":
        raise Fault(
            "mlx-lm wrote CacheList without saying what is in it until 0.31.0; save the cache "
            "again with a newer one"
        )
    raise Mismatch("its header describes its caches")


def _cache_list(layer: Layer) -> Any:
    if layer.info == "":
        return _untold_list(layer)
    info, state = layer.info, layer.state
    if not isinstance(info, list) or len(info) != 2 or not isinstance(state, list):
        raise Mismatch("its header does not describe its caches")
    names, infos = info
    if not isinstance(names, list) or not isinstance(infos, list):
        raise Mismatch("its header does not describe its caches")
    if not len(names) == len(infos) == len(state):
        raise Fault(f"it names {len(names)} caches, describes {len(infos)} and has {len(state)}")
    children = [layer.child(*parts) for parts in zip(names, infos, state, strict=True)]
    return build.cache_list([read_child(LATE, child) for child in children])


def read_layer(readers: Mapping[str, Reader], layer: Layer) -> Any:
    """The cache that `layer` describes. Raises Mismatch or Fault."""
    if layer.name not in readers:
        raise Mismatch(f"this generation has no {layer.name}")
    return readers[layer.name](layer)


def read_child(readers: Mapping[str, Reader], child: Layer) -> Any:
    """The same for a cache inside a list, whose name nobody has looked at yet."""
    if not isinstance(child.name, str) or child.name not in readers:
        raise Fault(f"{clip(child.name)} is none of mlx-lm's caches")
    return readers[child.name](child)


_COMMON: dict[str, Reader] = {
    "KVCache": _kv,
    "ConcatenateKVCache": _concatenate,
    "MambaCache": _recurrent,
    "ArraysCache": _recurrent,
    "ChunkedKVCache": chunked,
}

#: Generation A, by class name.
EARLY: dict[str, Reader] = {
    **_COMMON,
    "RotatingKVCache": _rotating_with_step,
    "QuantizedKVCache": _quantized_with_step,
    "CacheList": _untold_list,
}

#: Generation B, by class name.
LATE: dict[str, Reader] = {
    **_COMMON,
    "RotatingKVCache": _rotating,
    "QuantizedKVCache": _quantized,
    "CacheList": _cache_list,
}
