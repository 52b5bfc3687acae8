"""What a model's cache holds, and the bytes that it takes with each codec."""

from __future__ import annotations

from dataclasses import dataclass

from kvq import codec as codecs


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """`layers` layers that keep for each token `heads` keys of `keys` and values of `values`."""

    layers: int
    heads: int
    keys: int
    values: int

    def bits(self, codec: str, raw_bits: int) -> float:
        """Stored bits a token."""
        chosen = codecs.get(codec)
        sides = (self.keys, self.values)
        return self.layers * self.heads * sum(n * chosen.bits_per_value(n, raw_bits) for n in sides)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """What a model keeps of a prompt.

    `kv` grows with every token; `window` is kept for the newest `window_tokens` only;
    `state_bytes` is the size of one snapshot of the recurrent layers. `raw_bits` are the bits of a
    value as computed, `logits` the values of the logits that a cache keeps of its last token.
    """

    kv: tuple[Rows, ...] = ()
    window: tuple[Rows, ...] = ()
    window_tokens: int = 0
    state_bytes: int = 0
    logits: int = 0
    raw_bits: int = 16

    def kv_bytes(self, codec: str) -> float:
        """Bytes that every token adds."""
        return sum(rows.bits(codec, self.raw_bits) for rows in self.kv) / 8

    def window_bytes(self, codec: str) -> float:
        """Bytes that the window layers take for one token, as long as they keep it."""
        return sum(rows.bits(codec, self.raw_bits) for rows in self.window) / 8

    def constant_bytes(self, codec: str) -> float:
        """Bytes of a long prompt's cache that do not depend on its length."""
        return self.window_tokens * self.window_bytes(codec) + self.state_bytes

    def cache_bytes(self, codec: str, tokens: int) -> float:
        """Bytes that are read to restore a cache of `tokens` tokens at its end."""
        windowed = min(tokens, self.window_tokens) * self.window_bytes(codec)
        return tokens * self.kv_bytes(codec) + windowed + self.state_bytes

    @property
    def logits_bytes(self) -> float:
        return self.logits * self.raw_bits / 8


def known_codec(codec: str) -> str:
    """`codec`, or for `auto` the one that it tries first."""
    return codec if codec in codecs.names() else "q8"
