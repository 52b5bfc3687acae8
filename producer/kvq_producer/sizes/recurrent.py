"""Sizes of one recurrent layer's state, for the families whose configs tell."""

from __future__ import annotations

from collections.abc import Callable

from kvq_producer.sizes.config import Config


def _bits(c: Config, *, inputs: int, kernel: int, state: int, state_bits: int = 32) -> int:
    """Bits of the newest `kernel` - 1 inputs of a convolution and of `state` recurrent values.

    Recurrent values are float32 in most families, whatever the model's dtype.
    """
    return (kernel - 1) * inputs * c.raw_bits + state * state_bits


def _delta(c: Config) -> int:
    heads, dim = c.integer("linear_num_value_heads"), c.integer("linear_value_head_dim")
    key_heads, key_dim = c.integer("linear_num_key_heads"), c.integer("linear_key_head_dim")
    return _bits(
        c,
        inputs=2 * key_heads * key_dim + heads * dim,
        kernel=c.integer("linear_conv_kernel_dim", default=4),
        state=heads * dim * key_dim,
    )


def _kimi(c: Config) -> int:
    linear = c.get("linear_attn_config")
    heads, dim = int(linear["num_heads"]), int(linear["head_dim"])
    kernel = int(linear["short_conv_kernel_size"])
    return _bits(c, inputs=3 * heads * dim, kernel=kernel, state=heads * dim * dim)


def _mamba(c: Config) -> int:
    inner = c.integer("mamba_expand", default=2) * c.integer("hidden_size")
    if c.model_type == "mamba":
        inner = c.integer("intermediate_size", "d_inner")
    return _bits(
        c,
        inputs=inner,
        kernel=c.integer("mamba_d_conv", "conv_kernel", "d_conv"),
        state=inner * c.integer("mamba_d_state", "state_size", "d_state"),
        state_bits=c.raw_bits,
    )


def _mamba2(c: Config) -> int:
    heads = c.integer("mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = heads * c.integer("mamba_d_head", "mamba_head_dim", "head_dim")
    size = c.integer("mamba_d_state", "ssm_state_size", "state_size")
    groups = c.integer("mamba_n_groups", "n_groups", default=1)
    return _bits(
        c,
        inputs=inner + 2 * groups * size,
        kernel=c.integer("mamba_d_conv", "conv_kernel", default=4),
        state=inner * size,
    )


def _convolution(c: Config) -> int:
    return _bits(c, inputs=c.integer("hidden_size"), kernel=c.integer("conv_L_cache"), state=0)


def _bailing(c: Config) -> int:
    heads, hidden = c.query_heads, c.integer("hidden_size")
    dim = c.head_dim if c.model_type == "bailing_hybrid" else hidden // heads
    v3 = "BailingMoeV3ForCausalLM" in (c.get("architectures") or ())
    inputs = 3 * heads * dim if v3 else 0
    return _bits(c, inputs=inputs, kernel=4, state=heads * dim * dim)


#: Bits of one recurrent layer's state, by model type.
STATES: dict[str, Callable[[Config], int]] = {
    "bailing_hybrid": _bailing,
    "bailing_moe_linear": _bailing,
    "falcon_h1": _mamba2,
    "granitemoehybrid": _mamba2,
    "jamba": _mamba,
    "kimi_k3": _kimi,
    "kimi_linear": _kimi,
    "lfm2": _convolution,
    "lfm2_moe": _convolution,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _mamba2,
    "olmo_hybrid": _delta,
    "qwen3_5_moe_text": _delta,
    "qwen3_5_text": _delta,
    "qwen3_next": _delta,
}
