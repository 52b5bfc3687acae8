"""Feeding a file's first and last tokens to the model again.

That shows whether the caches are those of these tokens and this model, and gives what a file does
not have: the logits after the last token, and how much a lossy codec changes the predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvq import codec as codecs
from kvq.cache.adapters import Rows, adapter_of
from kvq.cache.container import KVCacheContainer
from kvq.cache.leaves import describe, leaf_caches
from kvq.errors import UsageError
from kvq.exchange.rewind import can_rewind, rewound
from kvq.prefill.gate import Gate, replay_tokens
from kvq.store.keys import TokenIds

#: Tokens at the beginning that are fed again.
FIRST = 64
#: How far (relative, Euclidean) a token's rows in a file may be from the model's. Half types on
#: two machines differ by some percent, those of another token by about 1.
TOLERANCE = 0.2
#: The same where the file's layers were quantized.
QUANTIZED_TOLERANCE = 0.5


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """`logits` [vocab] after the last token and the codec's `quality`; None where unknown."""

    logits: mx.array | None = None
    quality: Mapping[str, Any] | None = None


def check_beginning(
    model: Any, caches: KVCacheContainer, ids: TokenIds, *, tolerance: float
) -> None:
    """Compare the rows of the first tokens, in the first layer that still has them.

    Raises UsageError where they are not those that the model computes for `ids`, and where its
    recurrent states are of another shape.
    """
    fresh = make_prompt_cache(model)
    count = min(FIRST, len(ids))
    model(mx.array(ids[:count])[None], cache=fresh)
    compared = False
    for ours, theirs in zip(leaf_caches(fresh), leaf_caches(caches), strict=True):
        adapter = adapter_of(theirs)
        if adapter is None:
            _check_state(ours.cache, theirs.cache)
        elif theirs.keys is not None and adapter.held(theirs) == len(ids) and not compared:
            compared = True
            rows = Rows(*(side[..., :count, :] for side in adapter.rows(theirs)))
            _check_rows(adapter.newest(ours, count), rows, tolerance, "first")


def replay(
    model: Any, caches: KVCacheContainer, ids: TokenIds, codec: str, *, tolerance: float
) -> Replayed:
    """Feed as many of the last tokens again as the caches allow, and compare their rows.

    The last token is fed alone. Raises UsageError as `check_beginning` does.
    """
    counts = [count for count in (replay_tokens(len(ids)), 1) if count]
    count = next((count for count in counts if can_rewind(caches, count)), 0)
    if not count:
        return Replayed()
    start = len(ids) - count
    copies = rewound(caches, count) if start else make_prompt_cache(model)
    names = () if codecs.get(codec).exact else (codec,)
    gate = Gate(model, ids, names, describe(caches), begin=start)
    gate.begin(copies, start)
    for low, high in ((start, len(ids) - 1), (len(ids) - 1, len(ids))):
        if low < high:
            logits = model(mx.array(ids[low:high])[None], cache=copies)[0]
            mx.eval(gate.listen(copies, logits, high), logits[-1])
    _check_end(copies, caches, count, tolerance)
    gate.replay(copies)
    measured = gate.measured.get(codec)
    quality = None if measured is None else {"codec": codec, **asdict(measured)}
    return Replayed(logits=logits[-1], quality=quality)


def _check_end(computed: list[Any], caches: KVCacheContainer, count: int, tolerance: float) -> None:
    """Compare the newest rows of the first layer, where they depend on the token alone."""
    for ours, theirs in zip(leaf_caches(computed), leaf_caches(caches), strict=True):
        adapter = adapter_of(theirs)
        if adapter is not None and theirs.keys is not None:
            _check_rows(
                adapter.newest(ours, count), adapter.newest(theirs, count), tolerance, "last"
            )
            return


def _check_rows(ours: Rows, theirs: Rows, tolerance: float, which: str) -> None:
    far = max(_distance(mine, other) for mine, other in zip(ours, theirs, strict=True))
    if not far <= tolerance:
        raise UsageError(
            f"these are not the caches of these tokens and this model: its keys and values of the "
            f"{which} tokens are {far:.0%} away from the file's"
        )


def _distance(ours: mx.array, theirs: mx.array) -> float:
    """The largest relative distance of a token's rows."""
    a, b = (side.astype(mx.float32).swapaxes(1, 2).flatten(2) for side in (ours, theirs))
    if a.size == 0:
        return 0.0
    far = mx.linalg.norm(a - b, axis=-1) / mx.maximum(mx.linalg.norm(a, axis=-1), 1e-6)
    return cast(float, far.max().item())


def _check_state(ours: list[Any], theirs: list[Any]) -> None:
    shapes = [[None if one is None else one.shape for one in slots] for slots in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"its recurrent states have the shapes {shapes[1]}, the model's {shapes[0]}"
        )
