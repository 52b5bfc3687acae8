"""Taking apart what a header says about one layer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvq.stock.faults import Fault, Mismatch

_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One cache as the generations before C describe it."""

    #: The class name in the file; known to be in the allow-list when a reader sees it.
    name: str
    #: A string, or nested lists of strings.
    info: Any
    #: Nested lists of arrays; None where the file has no tensors for it.
    state: Any
    #: How many tokens the file's KVCache layers hold; None where it has none or they disagree.
    position: int | None

    def child(self, name: str, info: Any, state: Any) -> Layer:
        return replace(self, name=name, info=info, state=state)


def no_info(info: Any) -> None:
    """Insist on the empty string, which says "nothing to add"."""
    if info != "":
        raise Mismatch("its header has fields that this generation does not write")


def integers(info: Any, count: int) -> list[int]:
    """Insist on `count` integers, each written in decimal."""
    if not isinstance(info, list) or len(info) != count:
        raise Mismatch(f"its header does not have {count} fields")
    return [integer(text) for text in info]


def integer(text: Any) -> int:
    if not isinstance(text, str) or not _INTEGER.fullmatch(text):
        raise Fault(f"{clip(text)} should be a whole number")
    return int(text)


def arrays(state: Any, count: int | None = None) -> list[mx.array]:
    """Insist on a list of arrays, `count` of them unless that is None."""
    if not isinstance(state, list) or (count is not None and len(state) != count):
        raise Mismatch(f"it does not have {'its' if count is None else count} tensors")
    if not all(isinstance(array, mx.array) for array in state):
        raise Mismatch("its tensors are nested in another way")
    return state


def rows(array: mx.array) -> int:
    """Insist on four dimensions and return the third, the number of tokens."""
    if array.ndim != 4:
        raise Fault(f"a tensor has {array.ndim} dimensions instead of 4")
    return int(array.shape[2])


def clip(value: Any) -> str:
    """`value` for a message: quoted, and not longer than a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
