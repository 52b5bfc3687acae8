"""Reading a stock prompt-cache file of any generation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvq.errors import FileFormatError
from kvq.stock import gen_a_write, gen_ab, gen_c, gen_c_write, gen_p, swift
from kvq.stock.faults import Fault, Mismatch
from kvq.stock.fields import Layer, clip
from kvq.stock.leaves import arrays as arrays_of
from kvq.stock.metadata import decode, section
from kvq.stock.promptfile import Generation, PromptCacheFile
from kvq.stock.tensors import read_tensors
from kvq.stock.tree import in_order, unflatten

Arrays = Mapping[str, mx.array]
Header = Mapping[str, str]

#: The generations that share one header, in the order in which they are tried.
_EARLIER: tuple[tuple[Generation, Mapping[str, gen_ab.Reader]], ...] = (
    ("A", gen_ab.EARLY),
    ("B", gen_ab.LATE),
    ("swift", swift.READERS),
)
_BATCH_CLASSES = ("BatchKVCache", "BatchRotatingKVCache")


def read_prompt_cache(file: str | os.PathLike[str]) -> PromptCacheFile:
    """Read a prompt cache that mlx-lm of any version, mlx-swift-lm or kvq wrote.

    Only mlx-lm's own cache classes are built, whatever names the file has. Everything is evaluated:
    the file may be replaced or removed afterwards. Buffers are padded as mlx-lm's are.

    Raises FileFormatError, which names the file, the layer and the reason, for a file that is
    damaged, that holds another kind of cache, or whose contents mlx-lm's caches cannot hold
    exactly; UsageError where there is no such file; StoreUnavailable where it cannot be read.
    """
    path = Path(file)
    arrays, header = read_tensors(path)
    try:
        generation, cache, written = _restore(arrays, header)
        metadata, token_ids = decode(written)
        # Layer by layer, and with nothing else holding what was read: the padding would double it.
        del arrays
        for layer in cache:
            mx.eval(arrays_of(layer))
    except Fault as fault:
        raise FileFormatError(f"{path}: {fault}") from None
    except RecursionError as error:
        raise FileFormatError(f"{path}: its caches are nested too deeply") from error
    except RuntimeError as error:
        raise FileFormatError(f"{path}: it changed while it was read ({error})") from error
    found = PromptCacheFile(
        cache=cache, metadata=metadata, token_ids=token_ids, generation=generation
    )
    if token_ids is not None and found.tokens not in (None, len(token_ids)):
        raise FileFormatError(
            f"{path}: it has {len(token_ids)} token ids, but its caches hold {found.tokens} tokens"
        )
    return found


def _restore(arrays: Arrays, header: Header) -> tuple[Generation, list[Any], Any]:
    """Generation, caches and the user's entries of the header. Raises Fault."""
    if header.get(f"{gen_c_write.SCALARS}.0") == "":
        return "C", _current(arrays, header), section(header, gen_c_write.METADATA)
    if f"{gen_a_write.CLASSES}.0" in header:
        generation, cache = _earlier(arrays, header)
        return generation, cache, section(header, gen_a_write.METADATA)
    if gen_p.is_flat(arrays):
        return "P", gen_p.restore(arrays, header), dict(header)
    raise Fault("not a prompt cache: its header names no cache classes")


def _current(arrays: Arrays, header: Header) -> list[Any]:
    names = _classes(header, gen_c_write.CLASSES, gen_c.READERS)
    states = gen_c.unpack(arrays, header)
    if len(names) != len(states):
        raise Fault(f"it names {len(names)} caches and has tensors for {len(states)}")
    cache: list[Any] = []
    for name, state in zip(names, states, strict=True):
        cache.append(_in_layer(len(cache), name, gen_c.restore, name, state))
    return cache


def _earlier(arrays: Arrays, header: Header) -> tuple[Generation, list[Any]]:
    classes = section(header, gen_a_write.CLASSES)
    parts = (*arrays, *(classes.values() if isinstance(classes, dict) else ()))
    if any(part.startswith(swift.STATE_PREFIX) for part in parts):
        raise Fault("it holds the state of a vision model, for which mlx-lm's caches have no place")
    names = _classes(header, gen_a_write.CLASSES, {**gen_ab.LATE, **swift.READERS})
    states = unflatten(arrays)
    info = section(header, gen_a_write.INFO)
    infos = unflatten(info if isinstance(info, dict) else {})
    if not infos.keys() | states.keys() <= set(range(len(names))):
        raise Fault(f"it names {len(names)} caches and has parts of others")
    position = _position(names, states)
    layers = [
        Layer(name=name, info=infos.get(index), state=states.get(index), position=position)
        for index, name in enumerate(names)
    ]
    reached: tuple[int, str] = (-1, "")
    for generation, readers in _EARLIER:
        cache: list[Any] = []
        try:
            for layer in layers:
                read = gen_ab.read_layer
                cache.append(_in_layer(len(cache), layer.name, read, readers, layer))
        except Mismatch as mismatch:
            # What got furthest was most likely meant.
            reached = max(reached, (len(cache), str(mismatch)), key=lambda found: found[0])
        else:
            return generation, cache
    index, reason = reached
    raise Fault(f"layer {index} ({names[index]}): {reason}")


def _classes(header: Header, index: str, known: Mapping[str, Any]) -> list[str]:
    """The class names in order, each of them known."""
    entries = section(header, index)
    names = in_order(unflatten(entries if isinstance(entries, dict) else {}), "class")
    for layer, name in enumerate(names):
        if name in _BATCH_CLASSES:
            raise Fault(
                f"layer {layer} is a {name}: a batch of sequences was saved. Extract each sequence "
                "from its batch and save it alone"
            )
        if not isinstance(name, str) or name not in known:
            raise Fault(f"layer {layer} is of class {clip(name)}, which is none of mlx-lm's caches")
    return names


def _position(names: list[str], states: Mapping[int, Any]) -> int | None:
    """How many tokens the full-attention layers hold; None if they disagree or there are none."""
    counts = set()
    for index, name in enumerate(names):
        state = states.get(index)
        if name in ("KVCache", "KVCacheSimple") and isinstance(state, list):
            first = state[0]
            if isinstance(first, mx.array) and first.ndim == 4:
                counts.add(int(first.shape[2]))
    return counts.pop() if len(counts) == 1 else None


def _in_layer(index: int, name: str, read: Callable[..., Any], *arguments: Any) -> Any:
    """Call `read`, with the layer added to what it says is wrong."""
    try:
        return read(*arguments)
    except Fault as fault:
        raise Fault(f"layer {index} ({name}): {fault}") from None
