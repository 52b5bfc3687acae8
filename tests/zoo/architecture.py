"""What an entry of the zoo is: a real mlx-lm architecture, made tiny."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from zoo.fields import COMMON
from zoo.weights import fill

#: Letters of a cache layout, and the record kind that a cache of that class calls for.
CACHE_CLASSES = {
    "K": ("KVCache", "kv"),
    "R": ("RotatingKVCache", "window"),
    "A": ("ArraysCache", "state"),
    "C": ("ChunkedKVCache", "chunked"),
    "L": ("LayerCache", "unknown"),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A tiny model of one mlx-lm architecture.

    `caches` says which cache each entry of `make_prompt_cache` is, one letter each (see
    CACHE_CLASSES), a nested list in parentheses: "RRK", "(AK)(AK)".
    `window` is the sliding window or attention chunk in tokens, None where there is none.
    `chunk_free` is False where the logits depend on how the prompt is cut into chunks.
    `loadable` is False where no folder can be made that `mlx_lm.load` reads back.
    """

    name: str
    module: str
    config: dict[str, Any]
    caches: str
    window: int | None = None
    chunk_free: bool = True
    loadable: bool = True
    notes: str = ""
    adjust: Callable[[nn.Module], None] | None = None

    @property
    def kinds(self) -> frozenset[str]:
        """The record kinds among the caches: kv, window, state, chunked, unknown."""
        return frozenset(CACHE_CLASSES[letter][1] for letter in self.caches if letter.isalpha())

    @property
    def vocabulary(self) -> int:
        return self.config["vocab_size"]

    def build(self) -> nn.Module:
        """A new float32 model, its weights the same in every process."""
        module = importlib.import_module(f"mlx_lm.models.{self.module}")
        mx.random.seed(0)
        model = module.Model(module.ModelArgs.from_dict(self.fresh_config()))
        fill(model, seed=self.name)
        if self.adjust is not None:
            self.adjust(model)
        model.eval()
        return model

    def fresh_config(self) -> dict[str, Any]:
        """A copy of `config` as config.json has it; some models change what they are given."""
        return copy.deepcopy(self.config)

    def __str__(self) -> str:
        return self.name


def arch(name: str, caches: str, /, **fields: Any) -> Architecture:
    """An entry whose configuration is COMMON with `fields` over it.

    A field `text_config` is merged into COMMON the same way; the outer one then stays small.
    The names of Architecture's own fields are taken out first.
    """
    own = {key: fields.pop(key) for key in _OWN if key in fields}
    module = own.setdefault("module", name)
    outer: dict[str, Any] = {"model_type": module, **fields}
    if "text_config" in fields:
        outer["text_config"] = {**COMMON, **fields["text_config"]}
        config = {"vocab_size": COMMON["vocab_size"], **outer}
    else:
        config = {**COMMON, **outer}
    return Architecture(name=name, config=config, caches=caches, **own)


def layout(caches: list[Any]) -> str:
    """The letters of a prompt cache, as `Architecture.caches` has them; "?" for a class unknown."""
    return "".join(_letter(cache) for cache in caches)


def _letter(cache: Any) -> str:
    if type(cache).__name__ == "CacheList":
        return f"({layout(cache.caches)})"
    return _LETTERS.get(type(cache).__name__, "?")


_LETTERS = {name: letter for letter, (name, _) in CACHE_CLASSES.items()}
_OWN = ("module", "window", "chunk_free", "loadable", "notes", "adjust")
