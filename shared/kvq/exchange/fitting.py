"""Making a file's caches those of a model, or saying by name why they are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from kvq.cache.adapters import adapter_of
from kvq.cache.container import KVCacheContainer
from kvq.cache.convert import at, put
from kvq.cache.leaves import describe, iter_leaves
from kvq.cache.trim import tokens_in
from kvq.errors import CannotTrim, UsageError
from kvq.store.space import Leaf, Space


def fitted(caches: Sequence[Any], space: Space, *, tokens: int | None) -> KVCacheContainer:
    """`caches` as the model of `space` has them; quantized layers come out dequantized.

    `tokens` is what they cover where they do not count (recurrent layers only). Lazy. Raises
    UsageError, which names the layer, where they are another model's, hold several sequences, or
    have dropped tokens that this model's layers keep.
    """
    fitting = list(caches)
    ours = [leaf.path for leaf in space.leaves]
    theirs = [path for path, _ in iter_leaves(fitting)]
    if theirs != ours:
        raise UsageError(f"it has {len(theirs)} caches, the model {len(ours)}: {_ANOTHER}")
    for leaf in space.leaves:
        cache = at(fitting, leaf.path)
        if leaf.cache_class == "KVCache" and not isinstance(cache, KVCache):
            put(fitting, leaf.path, _as_full(cache, leaf))
    for stored, leaf in zip(describe(fitting), space.leaves, strict=True):
        if stored != leaf:
            raise UsageError(f"{_name(leaf)} {_difference(stored, leaf)}: {_ANOTHER}")
        _check_one_sequence(at(fitting, leaf.path), leaf)
    try:
        counted = tokens_in(fitting)
    except CannotTrim as error:
        raise UsageError(str(error)) from error
    return KVCacheContainer(fitting, tokens=counted or tokens or 0)


_ANOTHER = "another model made it, or one of another dtype or another version of mlx-lm"


def _as_full(cache: Any, leaf: Leaf) -> Any:
    """A KVCache of what `cache` holds, where that is every token; else `cache` itself."""
    if isinstance(cache, RotatingKVCache) and not cache.empty():
        adapter = adapter_of(cache)
        assert adapter is not None
        if adapter.held(cache) < cache.offset:
            raise UsageError(
                f"{_name(leaf)} has dropped tokens, which this model keeps: the file was made with "
                f"a cache of at most {cache.max_size} tokens (--max-kv-size)"
            )
    elif not isinstance(cache, QuantizedKVCache):
        return cache
    full = KVCache()
    if not cache.empty():
        source, target = adapter_of(cache), adapter_of(full)
        assert source is not None
        assert target is not None
        target.fill(full, source.rows(cache), cache.offset)
    return full


def _check_one_sequence(cache: Any, leaf: Leaf) -> None:
    arrays = cache.cache if leaf.record == "state" else [cache.keys]
    if any(array is not None and array.shape[0] != 1 for array in arrays):
        raise UsageError(f"{_name(leaf)} holds several sequences: write each to a file of its own")


def _difference(stored: Leaf, leaf: Leaf) -> str:
    for name, what in _FACTS.items():
        ours, theirs = getattr(leaf, name), getattr(stored, name)
        if ours != theirs:
            return f"has {what} {theirs or 'nothing'}, the model's {ours or 'nothing'}"
    return "is not the model's"


_FACTS = {
    "cache_class": "the class",
    "record": "records of the kind",
    "window": "a window of",
    "keep": "first tokens kept:",
    "keys": "keys (heads, dim)",
    "values": "values (heads, dim)",
    "keys_dtype": "keys of",
    "values_dtype": "values of",
    "slots": "slots:",
}


def _name(leaf: Leaf) -> str:
    return f"layer {'.'.join(map(str, leaf.path))}"
