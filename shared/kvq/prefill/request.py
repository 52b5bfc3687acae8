"""What a prefill is asked to do and what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvq.store.keys import TokenIds


@dataclass(frozen=True, kw_only=True)
class PrefillRequest:
    """One prompt to store, or a prefix that several prompts share.

    `name` is the cache's name; None stores the blocks without a manifest (a shared prefix).
    `codec` is raw, q8, q4, or auto: the smallest whose measured loss passes `max_kl`. `keep` are
    kept positions (tokens) besides the end, `keep_every` adds one every so many tokens, and
    `window_records` is `kept` (near kept positions) or `all`. `ttl` is seconds from now.
    """

    token_ids: TokenIds
    name: str | None
    codec: str = "q8"
    keep: tuple[int, ...] = ()
    window_records: str = "kept"
    keep_every: int | None = None
    max_kl: float | None = None
    ttl: float | None = None
    pin: bool = False
    worker: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PrefillOutcome:
    """What a prefill did. Sizes are bytes, durations seconds, the rest tokens.

    `bytes` is what a restore of the cache reads, shared blocks included; `bytes_written` what this
    prefill added to the store. `reused_tokens` were not computed again.
    """

    name: str | None
    space: str
    codec: str
    tokens: int
    reused_tokens: int
    prefilled_tokens: int
    bytes: int
    bytes_written: int
    lossy_prefix_tokens: int
    quality: Mapping[str, Any] | None
    notes: tuple[str, ...]
    prefill_seconds: float
    seconds: float

    def took(self, seconds: float) -> PrefillOutcome:
        """The same with the whole duration filled in."""
        return replace(self, seconds=seconds)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
