"""Writing a stock prompt-cache file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from kvq.errors import CacheError, UnsupportedModel, UsageError
from kvq.stock import gen_a_write, gen_c_write
from kvq.stock.leaves import covered_tokens, leaves
from kvq.stock.metadata import encode, token_list
from kvq.stock.publish import publishing
from kvq.stock.tensors import write_tensors

_BATCH_CLASSES = ("BatchKVCache", "BatchRotatingKVCache")
_SUFFIX = ".safetensors"


def write_prompt_cache(
    file: str | os.PathLike[str],
    cache: Sequence[Any],
    metadata: Any = None,
    *,
    token_ids: Iterable[int] | None = None,
    generation: Literal["A", "C"] = "C",
) -> Path:
    """Write a prompt cache as a file that mlx-lm reads, and return its path.

    `cache` is one mlx-lm cache for each entry of the model's `make_prompt_cache`; it is not
    changed. Only the rows that count are written: no padding, and nothing that was trimmed.
    `metadata` may be any JSON (object keys are strings). Of an object, mlx-lm itself sees each
    entry whose key it can keep, as a string; `mlx_lm.generate` wants "model" and
    "tokenizer_config". `token_ids` are those of the tokens that the caches cover. Generation "C" is
    for mlx-lm 0.32 and later, "A" for 0.19.1 to 0.28.0.

    Readers of the name see the earlier file or this one, whole, whatever happens; when the function
    returns, it is on the disk. Like mlx-lm, adds `.safetensors` to a name that does not end so.

    Raises, without touching the earlier file: UnsupportedModel for a class that is none of
    mlx-lm's; CacheError for a cache that the generation cannot hold; UsageError for metadata that
    is not JSON, token ids that do not fit or a folder that does not exist; StoreUnavailable for a
    full or read-only disk.
    """
    cache = _checked(cache)
    ids = None if token_ids is None else token_list(token_ids)
    user = encode(metadata, ids)
    covered = covered_tokens(cache)
    if ids is not None and covered not in (None, len(ids)):
        raise UsageError(f"{len(ids)} token ids for caches that cover {covered} tokens")
    arrays, header = _pack(cache, user, generation)
    path = Path(file)
    if path.suffix != _SUFFIX:
        path = path.with_name(path.name + _SUFFIX)
    with publishing(path) as opened:
        write_tensors(opened, arrays, header)
    return path


def _pack(
    cache: list[Any], user: dict[str, str], generation: str
) -> tuple[dict[str, mx.array], dict[str, str]]:
    if generation == "C":
        arrays, header = gen_c_write.pack([gen_c_write.describe(entry) for entry in cache])
        return arrays, header | {
            f"{gen_c_write.METADATA}.{key}": text for key, text in user.items()
        }
    if generation == "A":
        described = []
        for index, entry in enumerate(cache):
            try:
                described.append(gen_a_write.describe(entry))
            except CacheError as error:
                raise CacheError(f"layer {index} ({type(entry).__name__}): {error}") from None
        arrays, header = gen_a_write.pack(described)
        return arrays, header | {
            f"{gen_a_write.METADATA}.{key}": text for key, text in user.items()
        }
    raise UsageError(f"generation {generation!r} cannot be written: choose 'C' or 'A'")


def _checked(cache: Sequence[Any]) -> list[Any]:
    """`cache` as a list of caches of known classes."""
    if not isinstance(cache, (list, tuple)):
        raise UsageError(f"a prompt cache is a list of caches, not a {type(cache).__name__}")
    for index, entry in enumerate(cache):
        for leaf in leaves([entry]):
            name = type(leaf).__name__
            if name in _BATCH_CLASSES:
                raise CacheError(
                    f"layer {index} is a {name}: extract each sequence from the batch and write it "
                    "alone"
                )
            if type(leaf) not in gen_c_write.WRITERS:
                raise UnsupportedModel(
                    f"layer {index} is a {name}, which is none of mlx-lm's caches; it could not be "
                    "read back"
                )
    return list(cache)
