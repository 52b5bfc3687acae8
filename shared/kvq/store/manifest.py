"""A cache's manifest: `caches/<name>.json`, written last. Where it is, the cache is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import xxhash

from kvq.errors import DamagedFile, UnsupportedFormat
from kvq.store.disk import UNREADABLE
from kvq.store.keys import BLOCK, ROOT
from kvq.store.layout import BlockName, parse_stem

#: Version of a manifest. A reader refuses a greater one.
FORMAT = 1

_BLANK = "0" * 32
_MARK = b'"digest": "'


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """This prompt, this space, this chain.

    Times are seconds since 1970 UTC, durations seconds, sizes bytes. `chain` holds a block's file
    stem (`<key>.<n>.<first>`) for each block from token 0 on. `branches` holds (position, stem) of
    the blocks off the chain that end at a kept position inside one of its full blocks: there rests
    the recurrent state of that position. `nbytes` are those of all files that a restore of the
    whole reads, shared ones included. `quality` is the measured loss of a lossy codec on the
    prompt's last tokens; `lossy_prefix_tokens` says how many tokens were computed on top of lossy
    blocks, which that figure does not cover.
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
    branches: tuple[tuple[int, str], ...] = ()
    prefill_seconds: float = 0.0
    reused_tokens: int = 0
    lossy_prefix_tokens: int = 0
    quality: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    worker: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def blocks(self) -> tuple[BlockName, ...]:
        """The blocks of the chain, then those of the branches."""
        chain = tuple(_chain(self.chain))
        return (*chain, *(_branch(chain, at, stem) for at, stem in self.branches))

    def encode(self) -> bytes:
        """The file's bytes: indented JSON whose last entry digests the whole file."""
        facts = {"format": FORMAT, **asdict(self), "digest": _BLANK}
        blank = (json.dumps(facts, indent=1) + "\n").encode()
        return _with_digits(blank, _digest(blank))

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """The manifest in `data`, read from `path`. Raises DamagedFile, UnsupportedFormat."""
        try:
            facts = json.loads(data)
            version, digest = facts["format"], facts["digest"]
            if version > FORMAT:
                raise UnsupportedFormat(
                    f"{path}: manifest format {version} is newer than this kvq reads ({FORMAT}); "
                    "upgrade kvq on this machine"
                )
            if _digest(_with_digits(data, _BLANK)) != digest:
                raise DamagedFile(path, "the manifest's digest does not hold")
            known = {one.name for one in fields(cls)}
            facts = {name: value for name, value in facts.items() if name in known}
            for name in ("chain", "kept", "notes"):
                facts[name] = tuple(facts[name])
            facts["branches"] = tuple((at, stem) for at, stem in facts.get("branches", ()))
            manifest = cls(**facts)
            manifest.blocks()  # raises when they are not the names of blocks
        except UNREADABLE as error:
            raise DamagedFile(path, f"the manifest cannot be read ({error})") from error
        return manifest


def _chain(stems: tuple[str, ...]) -> Iterator[BlockName]:
    parent = ROOT
    for stem in stems:
        block = parse_stem(parent, stem)
        yield block
        parent = block.key


def _branch(chain: tuple[BlockName, ...], at: int, stem: str) -> BlockName:
    before = at // BLOCK
    return parse_stem(chain[before - 1].key if before else ROOT, stem)


def _with_digits(data: bytes, digits: str) -> bytes:
    """`data` with other digits in its last `digest`. Raises ValueError when it has none."""
    start = data.rindex(_MARK) + len(_MARK)
    return data[:start] + digits.encode() + data[start + len(digits) :]


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
