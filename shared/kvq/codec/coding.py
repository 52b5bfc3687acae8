"""What was done to one array of records: the part of a file's header that a reader decodes by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvq.errors import UnsupportedFormat

#: The group sizes that MLX's quantized kernels take.
GROUP_SIZES = (32, 64, 128)
PREFERRED_GROUP_SIZE = 64
#: Standardized channels are alike, so a group of them can be larger at little loss.
PREFERRED_OF_CHANNELS = 128

#: Leading tokens of a chain that stay as computed. Attention puts much of its weight on the first
#: tokens of a text whatever they are, so an error in them is an error everywhere.
SINK_TOKENS = 4

#: Padding may add at most this share of bits to a value.
MOST_PADDING = 1.25

#: A scale and a bias of 2 bytes each; likewise a channel's mean and deviation.
PAIR_BITS = 32
#: Tokens of a full block, which share the means and deviations of their channels.
BLOCK_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class LayerCoding:
    """How the last axis of one array is coded.

    `codec` is the one really used: "raw" where none of its groups fits. `bits`, `group_size` are 0
    and `padded_dim` equals `dim` when it is raw. With `channels`, it is each channel's distance
    from its mean, in deviations, that is coded. `note` says why it is not the plain case, or "".
    """

    codec: str
    dim: int
    bits: int = 0
    group_size: int = 0
    padded_dim: int
    channels: bool = False
    note: str = ""

    @property
    def exact(self) -> bool:
        """True when decoding gives back the very bits that were encoded."""
        return self.bits == 0

    def bits_per_value(self, raw_bits: int = 16) -> float:
        """Stored bits for each value of a full block, scales and padding included."""
        if self.exact or self.dim == 0:
            return float(raw_bits)
        per_group = self.group_size * self.bits + PAIR_BITS
        per_channel = PAIR_BITS / BLOCK_TOKENS if self.channels else 0.0
        return per_group * (self.padded_dim // self.group_size) / self.dim + per_channel

    def as_json(self) -> dict[str, Any]:
        """The coding as a JSON object, for a file's header."""
        if self.exact:
            facts: dict[str, Any] = {"codec": self.codec, "dim": self.dim}
        else:
            facts = {
                "codec": self.codec,
                "dim": self.dim,
                "bits": self.bits,
                "group_size": self.group_size,
                "padded_dim": self.padded_dim,
            } | ({"channels": True} if self.channels else {})
        return facts | ({"note": self.note} if self.note else {})

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> LayerCoding:
        """The coding that `as_json` wrote. Raises UnsupportedFormat when it makes no sense."""
        try:
            dim = int(facts["dim"])
            coding = cls(
                codec=str(facts["codec"]),
                dim=dim,
                bits=int(facts.get("bits", 0)),
                group_size=int(facts.get("group_size", 0)),
                padded_dim=int(facts.get("padded_dim", dim)),
                channels=bool(facts.get("channels", False)),
                note=str(facts.get("note", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnsupportedFormat(f"not the coding of an array: {facts!r}") from error
        if not coding._sensible():
            raise UnsupportedFormat(
                f"this kvq cannot decode {dict(facts)!r}; a newer one may have written it"
            )
        return coding

    def _sensible(self) -> bool:
        if self.codec == "raw":
            plain = self.bits == 0 and not self.channels
            return plain and self.dim >= 0 and self.padded_dim == self.dim
        return (
            self.bits in (4, 8)
            and self.group_size in GROUP_SIZES
            and 0 < self.dim <= self.padded_dim
            and self.padded_dim % self.group_size == 0
        )


def plan(codec: str, bits: int, dim: int, *, channels: bool = False) -> LayerCoding:
    """The coding of rows of `dim` values with affine groups of `bits` bits.

    Where no group size divides `dim`, the rows are padded, if that adds at most a quarter to the
    bits of a value (80 as 96 in groups of 32: 10.8 bits at 8, not 9); the shortest padding wins,
    then the group size nearest to the preferred. Otherwise (8, 16, 40, 0) the rows stay raw.
    """
    if dim <= 0:
        return LayerCoding(codec="raw", dim=dim, padded_dim=dim)
    preferred = PREFERRED_OF_CHANNELS if channels else PREFERRED_GROUP_SIZE
    coding = partial(LayerCoding, codec=codec, dim=dim, bits=bits, channels=channels)
    group = resolve_group_size(dim, preferred=preferred)
    if group is not None:
        return coding(group_size=group, padded_dim=dim)
    padded = [
        coding(
            group_size=size,
            padded_dim=-(-dim // size) * size,
            note=f"no group size divides {dim}: padded to {-(-dim // size) * size}",
        )
        for size in sorted(GROUP_SIZES, key=lambda size: _distance(size, preferred))
    ]
    shortest = min(padded, key=lambda coding: coding.padded_dim)
    if shortest.padded_dim <= MOST_PADDING * dim:
        return shortest
    cost = min(coding.bits_per_value() for coding in padded)
    return LayerCoding(
        codec="raw",
        dim=dim,
        padded_dim=dim,
        note=f"no group size fits {dim}: padded, a value would take {cost:.3g} bits",
    )


def resolve_group_size(*dims: int, preferred: int = PREFERRED_GROUP_SIZE) -> int | None:
    """The group size nearest to `preferred` that divides every one of `dims`; the smaller on a tie.

    None when no group size does.
    """
    fitting = [size for size in GROUP_SIZES if all(d > 0 and d % size == 0 for d in dims)]
    return min(fitting, key=lambda size: _distance(size, preferred), default=None)


def _distance(size: int, preferred: int) -> tuple[int, int]:
    return abs(size - preferred), size
