"""Tiny random models of real mlx-lm architectures, for tests that must hold on every one of them.

ARCHITECTURES are those whose caches kvq supports; FOREIGN those that it must refuse by name.
MISSING are the modules of mlx-lm's that cannot be built on every machine, with the reason.
"""

from __future__ import annotations

import zlib

import numpy as np

from zoo.architecture import CACHE_CLASSES, Architecture, layout
from zoo.experts import EXPERTS
from zoo.folder import save_folder
from zoo.foreign import FOREIGN
from zoo.latent import LATENT
from zoo.plain import PLAIN
from zoo.recurrent import RECURRENT
from zoo.windows import WINDOWS

__all__ = [
    "ARCHITECTURES",
    "CACHE_CLASSES",
    "FOREIGN",
    "MISSING",
    "Architecture",
    "by_name",
    "layout",
    "prompt",
    "save_folder",
]

ARCHITECTURES: tuple[Architecture, ...] = (*PLAIN, *EXPERTS, *WINDOWS, *LATENT, *RECURRENT)

MISSING = {
    "bitnet": "its layers exist only as a Metal kernel",
    "muse_spark": "its attention exists only as a Metal kernel",
    "olmo": "its module needs the package ai2-olmo",
    "prism_hadamard_qwen35": "its configuration names 2-bit weights of fixed sizes",
}

_LONGEST_PROMPT = 4096


def by_name(name: str) -> Architecture:
    """The architecture called `name`; raises KeyError."""
    return {entry.name: entry for entry in (*ARCHITECTURES, *FOREIGN)}[name]


def prompt(architecture: Architecture, n: int) -> list[int]:
    """The first `n` (at most 4096) of an architecture's random token ids, none of them special."""
    if n > _LONGEST_PROMPT:
        raise ValueError(f"a prompt of {n} tokens is longer than {_LONGEST_PROMPT}")
    generator = np.random.default_rng(zlib.crc32(architecture.name.encode()))
    return generator.integers(3, architecture.vocabulary, _LONGEST_PROMPT)[:n].tolist()
