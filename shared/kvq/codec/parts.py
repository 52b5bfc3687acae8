"""From records to the named parts that a coding describes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq.codec.coding import LayerCoding
from kvq.errors import UnsupportedFormat

if TYPE_CHECKING:
    import mlx.core as mx

#: Fewer tokens than these (after the sinks) are not worth their channels' means and deviations.
FEWEST_SCALED_TOKENS = 8

_CODES = ("q", "s", "b")
_CHANNELS = ("m", "d")


def encode(x: mx.array, coding: LayerCoding, raw_tokens: int) -> dict[str, mx.array]:
    """The parts of `x` [layers, heads, tokens, dim]. Lazy; see `Codec.encode`."""
    if coding.exact:
        return {"": x}
    from kvq.codec import affine

    tokens = x.shape[2]
    sink = min(raw_tokens, tokens)
    if coding.channels and tokens - sink < FEWEST_SCALED_TOKENS:
        sink = tokens
    parts = {"sink": x[:, :, :sink]} if sink else {}
    if sink == tokens:
        return parts
    rest = x[:, :, sink:]
    if coding.channels:
        rest, *scaling = affine.standardize(rest)
        parts.update(zip(_CHANNELS, scaling, strict=True))
    codes = affine.quantize(rest, coding, affine.scale_dtype(x.dtype))
    parts.update(zip(_CODES, codes, strict=True))
    return parts


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
        channels = [parts[name] for name in _CHANNELS] if coding.channels else ()
        q, s, b = (parts[name] for name in _CODES)
        pieces.append(affine.dequantize(q, s, b, coding, dtype, channels))
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def take(parts: Mapping[str, mx.array], start: int, stop: int) -> dict[str, mx.array]:
    """The parts of the tokens from `start` to before `stop`, counted from the first of `parts`."""
    sink = parts["sink"].shape[2] if "sink" in parts else 0
    taken = {}
    for name in ("", "sink", *_CODES):
        before = sink if name in _CODES else 0
        if name in parts:
            first = max(start - before, 0)
            last = min(stop - before, parts[name].shape[2])
            if first < last:
                taken[name] = parts[name][:, :, first:last]
    if "q" in taken:  # what holds for every coded token
        taken.update((name, parts[name]) for name in _CHANNELS if name in parts)
    return taken


def check(parts: Mapping[str, mx.array], coding: LayerCoding) -> None:
    """Compare names and shapes before any kernel reads the bytes, for a header can lie.

    Raises UnsupportedFormat when the parts are not those that `coding` describes.
    """
    if not _fits({name: tuple(part.shape) for name, part in parts.items()}, coding):
        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        raise UnsupportedFormat(f"parts {shapes} do not fit the coding {coding.as_json()}")


def _fits(shapes: Mapping[str, tuple[int, ...]], coding: LayerCoding) -> bool:
    if any(len(shape) != 4 for shape in shapes.values()):
        return False
    if coding.exact:
        return shapes.keys() == {""} and shapes[""][-1] == coding.dim
    groups = coding.padded_dim // coding.group_size
    widths = {"q": coding.padded_dim * coding.bits // 32, "s": groups, "b": groups}
    coded = {*_CODES, *(_CHANNELS if coding.channels else ())}
    sink, rest = shapes.get("sink"), {k: v for k, v in shapes.items() if k != "sink"}
    if sink is None and not rest:
        return False
    if sink is not None and sink[-1] != coding.dim:
        return False
    if not rest:
        return True
    slabs = {shape[:2] for shape in shapes.values()}
    rows = {rest[name][2] for name in _CODES if name in rest}
    return (
        rest.keys() == coded
        and len(slabs) == len(rows) == 1
        and all(rest[name][-1] == width for name, width in widths.items())
        and all(rest[name][2:] == (1, coding.dim) for name in coded & set(_CHANNELS))
    )
