"""The codecs by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvq.codec import parts as _parts
from kvq.codec.coding import (
    PREFERRED_GROUP_SIZE,
    PREFERRED_OF_CHANNELS,
    SINK_TOKENS,
    LayerCoding,
    plan,
)
from kvq.errors import UsageError

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One way to store keys and values.

    `bits` is None for `raw`. With `channels`, each channel of a block is standardized first, and
    groups are preferred twice as large.
    """

    name: str
    bits: int | None = None
    channels: bool = False

    @property
    def exact(self) -> bool:
        """True when what is loaded has the very bits of what was stored."""
        return self.bits is None

    @property
    def parameters(self) -> dict[str, int]:
        """What, besides the name, decides the stored bytes: part of a space's identity."""
        if self.bits is None:
            return {}
        preferred = PREFERRED_OF_CHANNELS if self.channels else PREFERRED_GROUP_SIZE
        settings = {"group_size": preferred, "sink_tokens": SINK_TOKENS}
        return settings | ({"block_channels": 1} if self.channels else {})

    def plan(self, dim: int) -> LayerCoding:
        """What `encode` does to rows of `dim` values."""
        if self.bits is None:
            return LayerCoding(codec="raw", dim=dim, padded_dim=dim)
        return plan(self.name, self.bits, dim, channels=self.channels)

    def bits_per_value(self, dim: int, raw_bits: int = 16) -> float:
        """Stored bits a value in a full block; `raw_bits` where rows stay raw.

        Scales and padding are included, sinks and the header are not.
        """
        return self.plan(dim).bits_per_value(raw_bits)

    def encode(self, x: mx.array, *, raw_tokens: int = 0) -> dict[str, mx.array]:
        """The parts of `x` [layers, heads, tokens, dim]: float32, float16 or bfloat16.

        The first `raw_tokens` tokens stay as computed (`SINK_TOKENS` in the first block of a
        chain, else 0). Lazy: nothing is evaluated. The coding is `self.plan(x.shape[-1])`.
        """
        return _parts.encode(x, self.plan(x.shape[-1]), raw_tokens)

    def decode(self, parts: Mapping[str, mx.array], *, dim: int, dtype: mx.Dtype) -> mx.array:
        """`kvq.codec.decode` with the coding that this codec plans for `dim`."""
        return _parts.decode(parts, self.plan(dim), dtype)


_CODECS = {
    codec.name: codec
    for codec in (
        Codec(name="raw"),
        Codec(name="q8", bits=8),
        Codec(name="q4", bits=4, channels=True),
    )
}


def names() -> tuple[str, ...]:
    """Every codec's name, from exact to the most lossy, which is also from large to small."""
    return tuple(_CODECS)


def get(name: str) -> Codec:
    """The codec of that name. Raises UsageError when there is none."""
    try:
        return _CODECS[name]
    except KeyError:
        raise UsageError(f"no codec {name!r}; there are {', '.join(_CODECS)}") from None
