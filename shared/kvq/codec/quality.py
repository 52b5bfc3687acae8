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
from typing import cast

import mlx.core as mx

#: Stands for a divergence that is infinite or no number, which JSON cannot say.
UNBOUNDED = 1.0e30


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Divergence in nats over `tokens` predictions, and the share whose likeliest token agrees."""

    mean_kl: float
    max_kl: float
    top1: float
    tokens: int


def measure(exact: mx.array, lossy: mx.array) -> Quality:
    """Compare logits [tokens, vocab] of any float dtype, at least one token. Evaluates them."""
    divergence = kl_divergence(exact, lossy)
    agree = mx.argmax(exact, axis=-1) == mx.argmax(lossy, axis=-1)
    figures = mx.stack([divergence.mean(), divergence.max(), agree.astype(mx.float32).mean()])
    mean_kl, max_kl, top1 = cast(list[float], figures.tolist())
    return Quality(mean_kl=mean_kl, max_kl=max_kl, top1=top1, tokens=exact.shape[0])


def kl_divergence(exact: mx.array, lossy: mx.array) -> mx.array:
    """KL(exact || lossy) [tokens] in nats, float32, from logits [tokens, vocab]. Lazy."""
    log_p, log_q = (_log_softmax(logits) for logits in (exact, lossy))
    p = mx.exp(log_p)
    # A token that the model rules out has a logit of -inf and adds nothing.
    terms = mx.where(p > 0, p * (log_p - log_q), 0.0)
    # Rounding can leave a sum a little below 0.
    divergence = mx.maximum(terms.sum(axis=-1), 0.0)
    return mx.where(divergence < UNBOUNDED, divergence, UNBOUNDED)


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
