"""What the gate's measurements mean for one cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvq.codec.quality import Quality
from kvq.prefill.gate import choose, limit_of
from kvq.prefill.request import PrefillRequest


@dataclass(frozen=True)
class Verdict:
    """The codec that the cache is to have, its measured quality, and why if it is another."""

    codec: str
    quality: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def judge(measured: Mapping[str, Quality], codec: str, request: PrefillRequest) -> Verdict:
    """Choose among the measured codecs as `request` asks; `codec` is the one that was used.

    Where nothing could be measured (a prompt of fewer than 4 tokens, a shared prefix) the codec
    stays, except that `auto` and `max_kl` promise a measurement and so give `raw`.
    """
    limit = limit_of(request.codec, request.max_kl)
    if request.name is None or limit is None:
        return Verdict(codec, _facts(measured, codec))
    if not measured:
        return Verdict("raw", None, ("too short to measure a codec's loss: stored raw",))
    chosen = choose(measured, request.codec, limit)
    failed = tuple(
        f"{name} changes the predictions by {quality.mean_kl:.3g} nats, above {limit:g}: "
        f"stored as {chosen}"
        for name, quality in measured.items()
        if quality.mean_kl > limit and (request.codec == "auto" or name == request.codec)
    )
    return Verdict(chosen, _facts(measured, chosen), failed)


def passes(
    stored: str, quality: Mapping[str, Any] | None, codec: str, max_kl: float | None
) -> bool:
    """Whether a cache stored with `stored` and that `quality` answers a request for `codec`.

    Blocks without a known quality may be those of a codec that the gate refused.
    """
    limit = limit_of(codec, max_kl)
    if limit is None or stored == "raw":
        return True
    return quality is not None and quality["mean_kl"] <= limit


def _facts(measured: Mapping[str, Quality], codec: str) -> Mapping[str, Any] | None:
    """The quality of `codec` and, beside it, of the others that were measured."""
    if codec not in measured:
        return None
    others = {name: asdict(one) for name, one in measured.items() if name != codec}
    return {"codec": codec, **asdict(measured[codec]), **({"others": others} if others else {})}
