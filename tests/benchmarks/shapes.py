"""Models at real shapes, by name: only their caches (random rows), or whole (random weights)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma3_text, llama, qwen3
from mlx_lm.models.cache import KVCache, RotatingKVCache


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Layers, KV heads, head dim; with a `window`, all layers slide but each `every`-th."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int = 0
    every: int = 1
    dtype: mx.Dtype = mx.bfloat16

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, windows not counted as such."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.size


SHAPES = {
    "gemma3-270m": Shape(layers=18, kv_heads=1, head_dim=256, window=512, every=6),
    "llama-8b-shape": Shape(layers=32, kv_heads=8, head_dim=128),
    "qwen3-8b-shape": Shape(layers=36, kv_heads=8, head_dim=128),
    "gemma3-12b-shape": Shape(layers=48, kv_heads=8, head_dim=256, window=1024, every=6),
}


class CacheOnly:
    """Stands in for a model where only its caches matter: restoring and saving."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layers = [None] * shape.layers

    def make_cache(self) -> list[Any]:
        shape = self.shape
        return [
            KVCache()
            if not shape.window or (index + 1) % shape.every == 0
            else RotatingKVCache(max_size=shape.window)
            for index in range(shape.layers)
        ]

    def __call__(self, ids: mx.array, cache: Sequence[Any]) -> mx.array:
        """Random rows for each of `ids` ([1, n]) in every layer; no attention, zero logits."""
        shape = self.shape
        size = (1, shape.kv_heads, ids.shape[1], shape.head_dim)
        for layer in cache:
            layer.update_and_fetch(
                mx.random.normal(size, shape.dtype), mx.random.normal(size, shape.dtype)
            )
        return mx.zeros((1, ids.shape[1], 32), mx.float32)


_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-8b-shape": (
        llama,
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-8b-shape": (
        qwen3,
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "vocab_size": 151936,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-12b-shape": (
        gemma3_text,
        {
            "model_type": "gemma3_text",
            "hidden_size": 3840,
            "num_hidden_layers": 48,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "vocab_size": 262208,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
        },
    ),
    "gemma3-270m": (
        gemma3_text,
        {
            "model_type": "gemma3_text",
            "hidden_size": 640,
            "num_hidden_layers": 18,
            "intermediate_size": 2048,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "vocab_size": 262144,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 32768,
        },
    ),
}


def whole_model(name: str, dtype: mx.Dtype = mx.bfloat16) -> nn.Module:
    """The model with random weights of `dtype`: right for speed, meaningless in what it says."""
    module, config = _CONFIGS[name]
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model
