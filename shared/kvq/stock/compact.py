"""Cutting a buffer to the rows that count: no padding, nothing that was trimmed."""

from __future__ import annotations

from typing import Any

from mlx.utils import tree_map


def cut(buffer: Any, rows: int) -> Any:
    """The first `rows` rows of an array [batch, heads, rows, width] or of each in a tuple; lazy.

    None, which an empty cache has, stays None.
    """
    if buffer is None:
        return None
    return tree_map(lambda array: array[:, :, :rows], buffer)
