"""Random weights under which every logit depends on the whole context."""

from __future__ import annotations

import zlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

# What a recurrent state keeps from one token to the next depends on these. As models start them it
# keeps half, and the first token is soon lost in rounding; with these it keeps 97 % and more.
_SLOW_DECAY = {"A_log": -4.0, "recurrent_param": -5.0, "w_lora.lora.2.bias": -4.0}


def fill(model: nn.Module, seed: str) -> None:
    """Replace all parameters of `model` by float32 values that depend on `seed` and their name."""
    filled = []
    for name, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            key = mx.random.key(zlib.crc32(f"{seed} {name}".encode()))
            value = _values(name, value.astype(mx.float32), key)
        filled.append((name, value))
    model.update(tree_unflatten(filled))
    mx.eval(model.parameters())


def _values(name: str, start: mx.array, key: mx.array) -> mx.array:
    noise = mx.random.normal(start.shape, key=key)
    for leaf, value in _SLOW_DECAY.items():
        if name.endswith(leaf):
            return value + 0.3 * noise
    if start.ndim >= 2 and start.size > max(start.shape):
        # Rows of a matrix (of each head or expert), or the filters of a convolution.
        rows = start.shape[0] if "conv" in name else start.size // start.shape[-1]
        return noise * (rows / start.size) ** 0.5
    # Norms and biases: near where the model starts them, never constant.
    return start + 0.2 * noise
