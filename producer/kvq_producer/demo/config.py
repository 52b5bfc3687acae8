"""The folder's JSON files about the model, from the GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq.errors import UnsupportedModel


def model_config(facts: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json for a Gemma 3 text model; `facts` are the GGUF file's metadata by key.

    Raises UnsupportedModel for another architecture.
    """
    if facts["general.architecture"] != "gemma3":
        raise UnsupportedModel(f"not Gemma 3 but {facts['general.architecture']!r}")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": dtype,
        "hidden_size": facts["gemma3.embedding_length"],
        "num_hidden_layers": facts["gemma3.block_count"],
        "intermediate_size": facts["gemma3.feed_forward_length"],
        "num_attention_heads": facts["gemma3.attention.head_count"],
        "num_key_value_heads": facts["gemma3.attention.head_count_kv"],
        "head_dim": facts["gemma3.attention.key_length"],
        # Stored as the nearest float32, which would read 9.999999974752427e-07.
        "rms_norm_eps": round(facts["gemma3.attention.layer_norm_rms_epsilon"], 9),
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "max_position_embeddings": facts["gemma3.context_length"],
        "rope_theta": facts["gemma3.rope.freq_base"],
        "sliding_window": facts["gemma3.attention.sliding_window"],
        # The same for every Gemma 3 text model, so GGUF does not store them.
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        **_special_ids(facts),
    }


def generation_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: the ids that begin, end and pad a text."""
    return _special_ids(facts)


def _special_ids(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}_token_id": facts[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
