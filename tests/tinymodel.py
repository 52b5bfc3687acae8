"""A tiny random Llama in float32 with a tokenizer, made in a moment: a real model to mlx-lm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tinytext import byte_level, save_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE, LAYERS = 32, 4, 2, 16, 64, 2
CONTEXT = 8192
#: Renders roles and ends; a later turn changes nothing before it.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """The folder, with a model whose weights `seed` decides."""
    tokenizer = byte_level(TEMPLATE)
    save_model(
        folder,
        tokenizer,
        architectures=["LlamaForCausalLM"],
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=MIDDLE,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        torch_dtype="float32",
    )
    generator = np.random.default_rng(seed)

    def weights(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) * 0.1).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "model.embed_tokens.weight": weights(len(tokenizer), HIDDEN),
        "model.norm.weight": ones,
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": weights(HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": weights(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": weights(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": weights(HIDDEN, HEADS * HEAD_DIM),
            f"{name}.mlp.gate_proj.weight": weights(MIDDLE, HIDDEN),
            f"{name}.mlp.up_proj.weight": weights(MIDDLE, HIDDEN),
            f"{name}.mlp.down_proj.weight": weights(HIDDEN, MIDDLE),
            f"{name}.input_layernorm.weight": ones,
            f"{name}.post_attention_layernorm.weight": ones,
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder
