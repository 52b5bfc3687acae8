"""Functions with the names and signatures of mlx-lm's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, overload

# By name, so that putting ours in the place of mlx-lm's does not make it call itself.
from mlx_lm.models.cache import make_prompt_cache as _make_prompt_cache

from kvq.stock.read import read_prompt_cache
from kvq.stock.write import write_prompt_cache


def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """A new cache for `model`, from mlx-lm.

    `max_kv_size` (tokens) makes every layer a window of that size, the first 4 tokens kept; mlx-lm
    ignores it for models that make their own caches, which many do.
    """
    made: list[Any] = _make_prompt_cache(model, max_kv_size)
    return made


def save_prompt_cache(
    file_name: str | os.PathLike[str], cache: Sequence[Any], metadata: Any = None
) -> None:
    """Write `cache` for mlx-lm 0.32 and later; see `write_prompt_cache`."""
    write_prompt_cache(file_name, cache, metadata)


@overload
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: Literal[False] = False
) -> list[Any]: ...


@overload
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: Literal[True]
) -> tuple[list[Any], Any]: ...


@overload
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool
) -> list[Any] | tuple[list[Any], Any]: ...


def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False
) -> list[Any] | tuple[list[Any], Any]:
    """The caches in a file of any generation, with its metadata if asked.

    See `read_prompt_cache`.
    """
    found = read_prompt_cache(file_name)
    return (found.cache, found.metadata) if return_metadata else found.cache
