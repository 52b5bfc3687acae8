"""The user's metadata and the token ids, as strings that mlx-lm keeps.

mlx-lm's metadata is a flat dict of strings, and it reads keys with dots, digits or nothing in them
back as something else. What such a dict can hold is written as it is. For anything more one more
entry, "kvq", holds all of it as JSON; what mlx-lm can hold stays beside it, so that its own
`metadata["model"]` goes on working.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvq.errors import UsageError
from kvq.stock.faults import Fault

_KEY = "kvq"
_FORMAT = 1
_LARGEST_ID = 2**32 - 1


def token_list(token_ids: Iterable[int]) -> list[int]:
    """The ids as plain integers. Raises UsageError where one is not a uint32."""
    plain = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    try:
        ids = [operator.index(token) for token in plain]
    except TypeError as error:
        raise UsageError(f"token ids must be whole numbers: {error}") from error
    if ids and not 0 <= min(ids) <= max(ids) <= _LARGEST_ID:
        raise UsageError(f"token ids must be from 0 to {_LARGEST_ID}")
    return ids


def encode(metadata: Any, ids: list[int] | None) -> dict[str, str]:
    """Flat entries for `metadata` and the ids. Raises UsageError where `metadata` is not JSON."""
    metadata = {} if metadata is None else metadata
    try:
        whole = {"format": _FORMAT, "metadata": metadata, "token_ids": ids}
        text = json.dumps(whole, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the metadata cannot be written as JSON: {error}") from error
    flat: dict[str, str] = {}
    if isinstance(metadata, dict):
        flat = {key: _string(value) for key, value in metadata.items() if _survives(key, value)}
    if ids is not None or flat != metadata:
        flat[_KEY] = text
    return flat


def decode(flat: Mapping[str, str] | str) -> tuple[Any, np.ndarray | None]:
    """The metadata as it was written, and the token ids (uint32) where the file has them."""
    if isinstance(flat, str) or _KEY not in flat:
        return flat, None
    try:
        whole = json.loads(flat[_KEY])
    except (ValueError, RecursionError):
        return flat, None
    if not isinstance(whole, dict) or not {"format", "metadata", "token_ids"} <= whole.keys():
        return flat, None
    if whole["format"] != _FORMAT:
        raise Fault("its metadata was written by a newer kvq")
    return whole["metadata"], _ids(whole["token_ids"])


def section(header: Mapping[str, str], index: str) -> dict[str, str] | str:
    """The user's entries out of a header: those under `index`, with what follows its dot.

    A dot in what follows is part of the key. mlx-lm could also have meant a nested dict, but it
    promises to take strings only.
    """
    if index in header:
        return header[index]
    prefix = f"{index}."
    return {
        key.removeprefix(prefix): value for key, value in header.items() if key.startswith(prefix)
    }


def _ids(ids: Any) -> np.ndarray | None:
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(
        type(token) is int and 0 <= token <= _LARGEST_ID for token in ids
    ):
        raise Fault("its token ids are damaged")
    return np.array(ids, dtype=np.uint32)


def _survives(key: Any, value: Any) -> bool:
    """Whether mlx-lm would give back this entry under this key."""
    if not isinstance(key, str) or key in ("", _KEY) or "." in key or _like_int(key):
        return False
    return _encodable(key) and _encodable(_string(value))


def _like_int(key: str) -> bool:
    try:
        int(key)
    except ValueError:
        return False
    return True


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _string(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
