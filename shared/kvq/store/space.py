"""A space: what must be equal for two prompts to share blocks, and how the model's layers rest.

The digest covers what decides the tensors' bytes: fingerprint, KV dtype, codec, and a cache
length limit where one was set. The layers' layout follows from those and is kept beside them, so
that a match can be planned without the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

#: Version of space.json.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One cache of the model, after nested lists are opened.

    `path` leads to it from the prompt cache ((3,) or (3, 0) inside a list). `record` is `kv`,
    `window`, `state` or `empty` (a layer that keeps nothing). `window` is how many newest tokens a
    window leaf needs, `keep` how many first ones. `keys` and `values` are (heads, dim).
    """

    path: tuple[int, ...]
    cache_class: str
    record: str
    window: int = 0
    keep: int = 0
    keys: tuple[int, int] | None = None
    values: tuple[int, int] | None = None
    keys_dtype: str = ""
    values_dtype: str = ""
    slots: int = 0

    def as_json(self) -> dict[str, Any]:
        facts = {
            "path": list(self.path),
            "class": self.cache_class,
            "record": self.record,
            "window": self.window,
            "keep": self.keep,
            "keys": list(self.keys) if self.keys else None,
            "values": list(self.values) if self.values else None,
            "keys_dtype": self.keys_dtype,
            "values_dtype": self.values_dtype,
            "slots": self.slots,
        }
        return {name: value for name, value in facts.items() if value or name == "path"}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Leaf:
        def pair(name: str) -> tuple[int, int] | None:
            found = facts.get(name)
            return (int(found[0]), int(found[1])) if found else None

        return cls(
            path=tuple(int(i) for i in facts["path"]),
            cache_class=str(facts["class"]),
            record=str(facts["record"]),
            window=int(facts.get("window", 0)),
            keep=int(facts.get("keep", 0)),
            keys=pair("keys"),
            values=pair("values"),
            keys_dtype=str(facts.get("keys_dtype", "")),
            values_dtype=str(facts.get("values_dtype", "")),
            slots=int(facts.get("slots", 0)),
        )


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a restore at a position needs besides the `kv` records: see `needs_of`."""

    #: Newest tokens whose window records are needed; 0 when the model has no window layer.
    window: int
    #: First tokens whose window records are needed too (attention sinks of rotating caches).
    keep: int
    #: Whether a recurrent state is needed, which exists only where it was kept.
    state: bool


def needs_of(leaves: tuple[Leaf, ...]) -> Needs:
    """What a model with these leaves needs to be restored."""
    windows = [leaf for leaf in leaves if leaf.record == "window"]
    return Needs(
        window=max((leaf.window for leaf in windows), default=0),
        keep=max((leaf.keep for leaf in windows), default=0),
        state=any(leaf.record == "state" for leaf in leaves),
    )


@dataclass(frozen=True, kw_only=True)
class Space:
    """See the module. `dtype` is the tensors' dtype before the codec, such as bfloat16."""

    fingerprint: str
    dtype: str
    codec: str
    codec_parameters: Mapping[str, Any] = field(default_factory=dict)
    max_kv_size: int | None = None
    leaves: tuple[Leaf, ...] = ()

    @property
    def digest(self) -> str:
        """The space's folder name: blake2b-160, in hex, of the facts as canonical JSON."""
        facts = json.dumps(self._facts(), sort_keys=True, separators=(",", ":"))
        return blake2b(facts.encode(), digest_size=20).hexdigest()

    @property
    def needs(self) -> Needs:
        return needs_of(self.leaves)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self._facts(),
            "leaves": [leaf.as_json() for leaf in self.leaves],
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Space:
        """The space in a space.json. Raises KeyError, TypeError, ValueError when it is not one."""
        return cls(
            fingerprint=str(facts["fingerprint"]),
            dtype=str(facts["dtype"]),
            codec=str(facts["codec"]),
            codec_parameters=dict(facts["codec_parameters"]),
            max_kv_size=facts["max_kv_size"],
            leaves=tuple(Leaf.from_json(leaf) for leaf in facts["leaves"]),
        )

    def _facts(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "codec": self.codec,
            "codec_parameters": dict(self.codec_parameters),
            "max_kv_size": self.max_kv_size,
        }
