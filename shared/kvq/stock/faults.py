"""Why a part of a file cannot be read. `read_prompt_cache` adds the file and the layer."""

from __future__ import annotations


class Fault(Exception):
    """The part is damaged, or holds what mlx-lm's caches cannot."""


class Mismatch(Exception):
    """The part is not laid out as this generation lays it out; another one may fit."""
