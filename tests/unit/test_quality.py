"""The quality figures of a lossy cache, against scipy-free float64 arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core")

from kvq.codec.quality import UNBOUNDED, compare, divergence, measure  # noqa: E402


def kl(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (p_logits, q_logits))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * (np.log(p) - np.log(q))).sum(-1)


def test_a_divergence_worked_by_hand():
    # P = (1/2, 1/2), Q = (1/4, 3/4): (ln 2 + ln(2/3)) / 2
    exact = mx.array([[0.0, 0.0]])
    lossy = mx.array([[0.0, math.log(3)]])
    divergence, agrees = compare(exact, lossy)
    assert divergence == pytest.approx([(math.log(2) + math.log(2 / 3)) / 2])
    assert agrees.tolist() == [False]


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 5),
    vocab=st.integers(2, 300),
    noise=st.floats(0, 3),
    shift=st.floats(-50, 50),
    seed=st.integers(0, 99),
)
def test_figures_are_those_of_the_formula(tokens, vocab, noise, shift, seed):
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=(tokens, vocab)) * 4
    lossy = exact + noise * rng.normal(size=exact.shape) + shift
    quality = measure(mx.array(exact.astype(np.float32)), mx.array(lossy.astype(np.float32)))
    expected = kl(exact, lossy)
    assert quality.mean_kl == pytest.approx(expected.mean(), rel=1e-3, abs=1e-5)
    assert quality.max_kl == pytest.approx(expected.max(), rel=1e-3, abs=1e-5)
    assert quality.top1 == pytest.approx((exact.argmax(-1) == lossy.argmax(-1)).mean())
    assert quality.tokens == tokens
    # A GPU's figures are worked out by MLX, a processor's by NumPy.
    on_gpu, agrees = divergence(mx, *(mx.array(x.astype(np.float32)) for x in (exact, lossy)))
    assert np.array(on_gpu) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert np.array(agrees).tolist() == (exact.argmax(-1) == lossy.argmax(-1)).tolist()


def test_the_same_predictions_lose_nothing():
    logits = mx.random.normal((7, 1000)).astype(mx.bfloat16)
    quality = measure(logits, logits + 2.0)
    same = measure(logits, logits)
    assert (same.mean_kl, same.max_kl, same.top1, same.tokens) == (0.0, 0.0, 1.0, 7)
    assert quality.mean_kl < 1e-3


def test_top1_counts_tokens_whose_likeliest_answer_stays():
    exact = mx.array([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0], [0.0, 3.0]])
    lossy = mx.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    assert measure(exact, lossy).top1 == 0.75


def test_tokens_that_are_ruled_out_add_nothing():
    exact = mx.array([[1.0, 2.0, -math.inf]])
    assert measure(exact, exact).max_kl == 0.0
    assert divergence(mx, exact, exact)[0].item() == 0.0


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_predictions_that_broke_are_unboundedly_far_and_still_json(broken):
    quality = measure(mx.array([[1.0, 2.0]] * 9), mx.array([[1.0, broken]] * 9))
    assert quality.max_kl == pytest.approx(UNBOUNDED)
    assert not quality.mean_kl <= 1e9
    on_gpu, _ = divergence(mx, mx.array([[1.0, 2.0]]), mx.array([[1.0, broken]]))
    assert on_gpu.item() == pytest.approx(UNBOUNDED)
    json.dumps(asdict(quality), allow_nan=False)
