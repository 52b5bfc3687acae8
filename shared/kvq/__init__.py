"""Prompt caches computed ahead of time: match, load, trim, resume.

Importing kvq imports nothing heavy: MLX is loaded with the first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq.cache.container import KVCacheContainer as KVCacheContainer
    from kvq.cache.trim import trim as trim
    from kvq.errors import KvqError as KvqError
    from kvq.generate.iterator import TokenIterator as TokenIterator
    from kvq.generate.llm import LLM as LLM
    from kvq.generate.llm import open_model as open
    from kvq.generate.parameters import GenerateParameters as GenerateParameters
    from kvq.model.fingerprint import fingerprint as fingerprint
    from kvq.stock import read_prompt_cache as read_prompt_cache
    from kvq.stock import write_prompt_cache as write_prompt_cache
    from kvq.store import Match as Match
    from kvq.store import Store as Store

#: Public name -> (module, name there).
_DOOR = {
    # Resume a generation.
    "open": ("kvq.generate.llm", "open_model"),
    "LLM": ("kvq.generate.llm", "LLM"),
    "TokenIterator": ("kvq.generate.iterator", "TokenIterator"),
    "GenerateParameters": ("kvq.generate.parameters", "GenerateParameters"),
    # Match and load.
    "Store": ("kvq.store", "Store"),
    "Match": ("kvq.store", "Match"),
    "fingerprint": ("kvq.model.fingerprint", "fingerprint"),
    # Prompt caches in memory and in stock files.
    "KVCacheContainer": ("kvq.cache.container", "KVCacheContainer"),
    "trim": ("kvq.cache.trim", "trim"),
    "read_prompt_cache": ("kvq.stock", "read_prompt_cache"),
    "write_prompt_cache": ("kvq.stock", "write_prompt_cache"),
    # What can go wrong.
    "KvqError": ("kvq.errors", "KvqError"),
}

__all__ = [
    "LLM",
    "GenerateParameters",
    "KVCacheContainer",
    "KvqError",
    "Match",
    "Store",
    "TokenIterator",
    "fingerprint",
    "open",
    "read_prompt_cache",
    "trim",
    "write_prompt_cache",
]


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _DOOR[name]
    except KeyError:
        raise AttributeError(f"module 'kvq' has no attribute {name!r}") from None
    value = getattr(_import(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _import(module: str) -> Any:
    from kvq.errors import MissingExtra

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in {"mlx", "mlx_lm"}:
            raise MissingExtra(package, "mlx") from error
        if package == "transformers":
            raise MissingExtra(package, "producer") from error
        raise
