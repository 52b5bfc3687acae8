"""From a stored cache to a stock mlx-lm file. Needs no model: a space says what its caches are."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvq.errors import CannotTrim, StoreError
from kvq.exchange.empty import CachesOf
from kvq.stock import write_prompt_cache
from kvq.store import Manifest, Match, Space, Store
from kvq.store.match import match_in_space
from kvq.store.verify.caches import token_ids

#: Entry of a stock file's metadata in which kvq says where the caches come from.
ORIGIN = "kvq_cache"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: `tokens` of the cache `name`, `bytes` in the file at `path`."""

    name: str
    path: Path
    generation: str
    tokens: int
    codec: str
    bytes: int

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def export_cache(
    store: Store,
    name: str,
    file: str | os.PathLike[str],
    *,
    generation: Literal["A", "C"] = "C",
    upto: int | None = None,
    model: str | None = None,
) -> Exported:
    """Write the cache `name`, or its first `upto` tokens, as a file that mlx-lm reads.

    What was stored with a lossy codec is written decoded. The file holds the token ids, and the
    metadata that `mlx_lm.generate --prompt-cache-file` asks for; `model` is the name by which it
    then loads the model (default: the one that the worker knew it by). It appears whole or not at
    all.

    Raises CacheNotFound, CannotTrim for an `upto` that cannot be restored, CacheError for a cache
    that the generation cannot hold, StoreError where the cache is no longer whole, and what
    `write_prompt_cache` raises.
    """
    manifest = store.manifest(name)
    space = _space_of(store, manifest)
    ids = token_ids(store, manifest)
    if len(ids) < manifest.tokens:
        raise _no_longer_whole(manifest, len(ids), "the next block is missing or damaged")
    match = match_in_space(store, space, store.space_folder(space), ids)
    if match.tokens < manifest.tokens:
        raise _no_longer_whole(manifest, match.tokens, match.reason.message)
    cache = _load(match, manifest, upto)
    path = write_prompt_cache(
        file,
        list(cache),
        {
            "model": model or manifest.model,
            # mlx_lm.generate parses it.
            "tokenizer_config": "{}",
            ORIGIN: _origin(manifest),
        },
        token_ids=match.ids[: cache.tokens],
        generation=generation,
    )
    return Exported(
        name=name,
        path=path,
        generation=generation,
        tokens=cache.tokens,
        codec=manifest.codec,
        bytes=path.stat().st_size,
    )


def _space_of(store: Store, manifest: Manifest) -> Space:
    for space in store.spaces(manifest.fingerprint):
        if space.digest == manifest.space:
            return space
    raise _no_longer_whole(manifest, 0, "its space.json is gone or damaged")


def _load(match: Match, manifest: Manifest, upto: int | None) -> Any:
    assert match.space is not None
    wanted = match.tokens if upto is None else upto
    if wanted < 1:
        raise CannotTrim("a file of no tokens helps nobody: give --upto from 1 on", nearest=1)
    cache = match.load(CachesOf(match.space), upto=upto)
    if cache.tokens < wanted:
        reason = cache.reason.message if cache.reason else "a file is damaged"
        raise _no_longer_whole(manifest, cache.tokens, reason)
    return cache


def _no_longer_whole(manifest: Manifest, tokens: int, why: str) -> StoreError:
    return StoreError(
        f"the cache {manifest.name!r} is no longer whole: {tokens} of its {manifest.tokens} tokens "
        f"can be restored ({why}). Prefill its prompt again"
    )


def _origin(manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "fingerprint": manifest.fingerprint,
        "codec": manifest.codec,
        "quality": manifest.quality,
        "metadata": manifest.metadata,
    }
