"""The codecs by name, and decoding by what a header says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvq.codec.coding import PREFERRED_GROUP_SIZE, SINK_TOKENS, LayerCoding, plan
from kvq.errors import UnsupportedFormat, UsageError

if TYPE_CHECKING:
    import mlx.core as mx

_AFFINE_PARTS = ("q", "s", "b")


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One way to store keys and values. `bits` is None for `raw`."""

    name: str
    bits: int | None = None

    @property
    def exact(self) -> bool:
        """True when what is loaded has the very bits of what was stored."""
        return self.bits is None

    @property
    def parameters(self) -> dict[str, int]:
        """What, besides the name, decides the stored bytes: part of a space's identity."""
        if self.bits is None:
            return {}
        return {"group_size": PREFERRED_GROUP_SIZE, "sink_tokens": SINK_TOKENS}

    def plan(self, dim: int) -> LayerCoding:
        """What `encode` does to rows of `dim` values."""
        if self.bits is None:
            return LayerCoding(codec="raw", dim=dim, padded_dim=dim)
        return plan(self.name, self.bits, dim)

    def bits_per_value(self, dim: int, raw_bits: int = 16) -> float:
        """Stored bits a value, scales and padding included; `raw_bits` where rows stay raw."""
        return self.plan(dim).bits_per_value(raw_bits)

    def encode(self, x: mx.array, *, raw_tokens: int = 0) -> dict[str, mx.array]:
        """The parts of `x` [layers, heads, tokens, dim]: float32, float16 or bfloat16.

        The first `raw_tokens` tokens stay as computed (`SINK_TOKENS` in the first block of a
        chain, else 0). Lazy: nothing is evaluated. The coding is `self.plan(x.shape[-1])`.
        """
        coding = self.plan(x.shape[-1])
        if coding.exact:
            return {"": x}
        from kvq.codec import affine

        parts = {}
        sink = min(raw_tokens, x.shape[2])
        if sink:
            parts["sink"] = x[:, :, :sink]
        if sink < x.shape[2]:
            codes = affine.quantize(x[:, :, sink:], coding)
            parts.update(zip(_AFFINE_PARTS, codes, strict=True))
        return parts

    def decode(self, parts: Mapping[str, mx.array], *, dim: int, dtype: mx.Dtype) -> mx.array:
        """`decode` with the coding that this codec plans for `dim`."""
        return decode(parts, self.plan(dim), dtype)


_CODECS = {
    codec.name: codec
    for codec in (Codec(name="raw"), Codec(name="q8", bits=8), Codec(name="q4", bits=4))
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


def decode(parts: Mapping[str, mx.array], coding: LayerCoding, dtype: mx.Dtype) -> mx.array:
    """Records [layers, heads, tokens, dim] of `dtype` from their parts. Lazy.

    Raises UnsupportedFormat when the parts are not those that `coding` describes.
    """
    check(parts, coding)
    if coding.exact:
        return parts[""].astype(dtype)
    import mlx.core as mx

    from kvq.codec import affine

    pieces = []
    if "sink" in parts:
        pieces.append(parts["sink"].astype(dtype))
    if "q" in parts:
        pieces.append(affine.dequantize(parts["q"], parts["s"], parts["b"], coding, dtype))
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def take(parts: Mapping[str, mx.array], start: int, stop: int) -> dict[str, mx.array]:
    """The parts of the tokens from `start` to before `stop`, counted from the first of `parts`."""
    sink = parts["sink"].shape[2] if "sink" in parts else 0
    taken = {}
    for name, part in parts.items():
        before = 0 if name == "sink" else sink
        first, last = max(start - before, 0), min(stop - before, part.shape[2])
        if first < last:
            taken[name] = part[:, :, first:last]
    return taken


def check(parts: Mapping[str, mx.array], coding: LayerCoding) -> None:
    """Compare names and shapes before any kernel reads the bytes, for a header can lie.

    Raises UnsupportedFormat when the parts are not those that `coding` describes.
    """
    known = ("",) if coding.exact else ("sink", *_AFFINE_PARTS)
    widths = {"": coding.dim, "sink": coding.dim}
    whole: dict[str, tuple[str, ...]] = {"": ("",), "sink": ("sink",)}
    if not coding.exact:
        groups = coding.padded_dim // coding.group_size
        widths |= {"q": coding.padded_dim * coding.bits // 32, "s": groups, "b": groups}
        whole |= dict.fromkeys(_AFFINE_PARTS, _AFFINE_PARTS)
    rows = {name: part.shape[:-1] for name, part in parts.items()}
    fits = bool(parts) and all(
        name in known
        and part.ndim == 4
        and part.shape[-1] == widths[name]
        and all(rows.get(other) == rows[name] for other in whole[name])
        for name, part in parts.items()
    )
    if not fits:
        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        raise UnsupportedFormat(f"parts {shapes} do not fit the coding {coding.as_json()}")
