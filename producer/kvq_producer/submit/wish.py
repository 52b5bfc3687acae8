"""What a submitter wants of the prompts of a file, where their lines do not say it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvq.queue.messages import CacheToWrite
from kvq_producer.plan import Group
from kvq_producer.prompts import Prompt

_LONGEST_WORD = 60
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Settings for all prompts of a batch; a line's own win. `ttl` is seconds.

    `store` and `export`, the folder for stock mlx-lm files, are paths that workers are told; None
    is each worker's own store, and no such files.
    """

    model: str | None = None
    adapter: str | None = None
    store: str | None = None
    export: str | None = None
    codec: str = "q8"
    max_kl: float | None = None
    window_records: str = "kept"
    keep_every: int | None = None
    ttl: float | None = None
    pin: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    def group(self, model: str, prompt: Prompt) -> Group:
        """What the prompt must agree on with others to share their blocks."""
        return Group(
            model=_place(model),
            adapter=None if self.adapter is None else _place(self.adapter),
            codec=prompt.codec or self.codec,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What one prompt wants of its cache. `word` begins the name of one that was given none."""

    custom_id: str
    name: str | None
    word: str
    ttl: float | None
    pin: bool
    metadata: dict[str, Any]
    keep: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt, keep: tuple[int, ...], wish: Wish) -> Wanted:
        generated = prompt.custom_id == f"line-{prompt.line}"
        return cls(
            custom_id=prompt.custom_id,
            name=prompt.name,
            word="prompt" if generated else _file_word(prompt.custom_id),
            ttl=wish.ttl if prompt.ttl is None else prompt.ttl,
            pin=prompt.pin or wish.pin,
            metadata={**wish.metadata, **prompt.metadata},
            keep=keep,
        )


def caches_of(
    wanted: Sequence[Wanted], group: Group, key: bytes
) -> tuple[tuple[CacheToWrite, ...], tuple[str, ...]]:
    """The caches to write of token ids with the chain key `key`, and which each prompt gets.

    Prompts of the same ids that name no cache share one: it lives as long as any of them wants.
    """
    nameless = [one for one in wanted if one.name is None]
    caches = [
        CacheToWrite(name=one.name, ttl=one.ttl, pin=one.pin, metadata=one.metadata)
        for one in wanted
        if one.name is not None
    ]
    shared = ""
    if nameless:
        lifetimes = [one.ttl for one in nameless]
        shared = f"{nameless[0].word}-{content_digest(group, key)}"
        caches.insert(
            0,
            CacheToWrite(
                name=shared,
                ttl=None if None in lifetimes else max(t for t in lifetimes if t is not None),
                pin=any(one.pin for one in nameless),
                metadata=nameless[0].metadata,
            ),
        )
    return tuple(caches), tuple(one.name or shared for one in wanted)


def default_name(word: str, key: bytes, *, model: str, adapter: str | None, codec: str) -> str:
    """The name that a nameless prompt gets whose custom id is `word` and chain key `key`."""
    group = Group(
        model=_place(model), adapter=None if adapter is None else _place(adapter), codec=codec
    )
    return f"{_file_word(word)}-{content_digest(group, key)}"


def content_digest(group: Group, key: bytes) -> str:
    """12 hex digits of what a nameless cache holds, so that it gets the same name every time."""
    return blake2b(key + _group_facts(group), digest_size=6).hexdigest()


@lru_cache(maxsize=64)
def _group_facts(group: Group) -> bytes:
    return json.dumps([group.model, group.adapter, group.codec]).encode()


def _place(name: str) -> str:
    """A folder's name as every working directory understands it; a hub's id as it is."""
    folder = Path(name).expanduser()
    return str(folder.absolute()) if folder.is_dir() else name


def _file_word(custom_id: str) -> str:
    return _FOREIGN.sub("-", custom_id).strip("-._")[:_LONGEST_WORD] or "prompt"
