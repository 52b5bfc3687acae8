"""Names with dots, such as "3.0.1", into nested lists: no gaps, no name inside another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from kvq.stock.faults import Fault
from kvq.stock.fields import clip

_NAME = re.compile(r"(0|[1-9][0-9]{0,8})(\.(0|[1-9][0-9]{0,8})){0,31}", re.ASCII)

T = TypeVar("T")


def unflatten(flat: Mapping[str, Any]) -> dict[int, Any]:
    """The first index of each name, and under it a leaf or nested lists of leaves."""
    branches: dict[Any, Any] = {}
    for name, leaf in flat.items():
        if not _NAME.fullmatch(name):
            raise Fault(f"{clip(name)} is not a name that mlx-lm writes")
        *path, last = map(int, name.split("."))
        branch = branches
        for index in path:
            branch = branch.setdefault(index, {})
            if not isinstance(branch, dict):
                raise Fault(f"{clip(name)} is inside another")
        if last in branch:
            raise Fault(f"{clip(name)} has others inside it")
        branch[last] = leaf
    return {index: _listed(value) for index, value in branches.items()}


def in_order(items: Mapping[int, T], what: str) -> list[T]:
    """The values of 0, 1, 2 and so on; none may be missing. `what` they are is for the error."""
    for index in range(len(items)):
        if index not in items:
            raise Fault(f"{what} {index} is missing")
    return [items[index] for index in range(len(items))]


def _listed(branch: Any) -> Any:
    if not isinstance(branch, dict):
        return branch
    return in_order({index: _listed(value) for index, value in branch.items()}, "part")
