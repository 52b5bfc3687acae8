"""A cache's manifest: `caches/<name>.json`, written last. Where it is, the cache is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import xxhash

from kvq.errors import DamagedFile, UnsupportedFormat

#: Version of a manifest. A reader refuses a greater one.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """This prompt, this space, this chain.

    Times are seconds since 1970 UTC, durations seconds, sizes bytes. `chain` holds a block's file
    stem (`<key>.<n>.<first>`) for each block from token 0 on. `nbytes` are those of all files
    that a restore reads, shared ones included. `quality` is the measured loss of a lossy codec on
    the prompt's last tokens; `lossy_prefix_tokens` says how many tokens were computed on top of
    lossy blocks, which that figure does not cover.
    """

    name: str
    space: str
    fingerprint: str
    model: str
    codec: str
    dtype: str
    tokens: int
    chain: tuple[str, ...]
    kept: tuple[int, ...]
    nbytes: int
    created: float
    expires: float | None = None
    pinned: bool = False
    prefill_seconds: float = 0.0
    reused_tokens: int = 0
    lossy_prefix_tokens: int = 0
    quality: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    worker: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The file's bytes: indented JSON whose last entry digests the others."""
        facts = {"format": FORMAT, **asdict(self)}
        facts["digest"] = _digest(facts)
        return (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """The manifest in `data`, read from `path`. Raises DamagedFile, UnsupportedFormat."""
        try:
            facts = json.loads(data)
            digest = facts.pop("digest")
            version = facts["format"]
            if version > FORMAT:
                raise UnsupportedFormat(
                    f"{path}: manifest format {version} is newer than this kvq reads ({FORMAT}); "
                    "upgrade kvq on this machine"
                )
            if _digest(facts) != digest:
                raise DamagedFile(path, "the manifest's digest does not hold")
            known = {one.name for one in fields(cls)}
            facts = {name: value for name, value in facts.items() if name in known}
            for name in ("chain", "kept", "notes"):
                facts[name] = tuple(facts[name])
            return cls(**facts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(path, f"the manifest cannot be read ({error})") from error


def _digest(facts: Mapping[str, Any]) -> str:
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(canonical.encode())
