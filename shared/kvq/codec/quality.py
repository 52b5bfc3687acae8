"""How far a lossy cache moves a model's predictions: what the gate measures and a manifest keeps.

For each replayed token, let P be the model's next-token distribution on exact records and Q the
one on decoded records. Its divergence, in nats, is

    KL(P || Q) = sum over the whole vocabulary of P(v) * (log P(v) - log Q(v))

after Kullback and Leibler (On Information and Sufficiency, 1951): the information that is lost by
taking Q for P, 0 only where they are equal. Top-1 is the share of tokens whose likeliest next
token is the same. Both are what "Accuracy is Not All You Need" (Dutta et al. 2024,
arXiv:2407.09141) proposes for compressed models, because averages such as perplexity hide answers
that flip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

#: Stands for a divergence that is infinite or no number, which JSON cannot say.
UNBOUNDED = 1.0e30

#: A logit whose exponential is 0 in float32, and one that is as far from all others as can be.
_NOTHING, _LEAST = -200.0, -3.0e38


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Divergence in nats over `tokens` predictions, and the share whose likeliest token agrees."""

    mean_kl: float
    max_kl: float
    top1: float
    tokens: int


def measure(exact: mx.array, lossy: mx.array) -> Quality:
    """Compare logits [tokens, vocab] of any float dtype, at least one token. Evaluates them."""
    kl, agree = compare(exact, lossy)
    return Quality(
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        top1=float(agree.mean()),
        tokens=len(kl),
    )


def compare(exact: mx.array, lossy: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """Of logits [tokens, vocab]: KL(exact || lossy) in nats, and whether the likeliest agrees.

    Both [tokens]: float32, bool. Evaluates the logits.
    """
    exact, lossy = exact.astype(mx.float32), lossy.astype(mx.float32)
    if mx.default_device().type == mx.gpu:
        kl, agree = divergence(mx, exact, lossy)
        return np.array(kl), np.array(agree)
    # NumPy has vector instructions for `exp`, MLX's CPU build for Linux has not: many times slower.
    # Row by row, what is in between stays in the processor's cache.
    mx.eval(exact, lossy)
    with np.errstate(all="ignore"):
        rows = [divergence(np, a, b) for a, b in zip(*map(np.asarray, (exact, lossy)), strict=True)]
    return np.array([kl for kl, _ in rows], np.float32), np.array([agree for _, agree in rows])


def divergence(xp: Any, exact: Any, lossy: Any) -> tuple[Any, Any]:
    """What `compare` gives, of float32 logits [..., vocab] of the module `xp`, MLX or NumPy."""
    # Counted from the largest, differences are small numbers and keep their digits.
    a, b = (logits - logits.max(axis=-1, keepdims=True) for logits in (exact, lossy))
    # A token that the model rules out has a logit of -inf: p is 0, and 0 times no infinity is 0.
    a, b = xp.maximum(a, _NOTHING), xp.maximum(b, _LEAST)
    p, q = xp.exp(a), xp.exp(b)
    total = p.sum(axis=-1)
    gaps = (p * (a - b)).sum(axis=-1) / total
    # Rounding can leave a sum a little below 0.
    kl = xp.maximum(gaps + xp.log(q.sum(axis=-1) / total), 0.0)
    kl = xp.where(kl < UNBOUNDED, kl, UNBOUNDED)
    return kl, exact.argmax(axis=-1) == lossy.argmax(axis=-1)
