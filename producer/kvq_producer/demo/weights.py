"""The GGUF file's tensors as the weights of an MLX or transformers Gemma 3 folder."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvq.errors import UnsupportedModel

if TYPE_CHECKING:
    import numpy as np

#: What the weights can be stored as. MLX runs bfloat16 slowly on a CPU.
DTYPES = ("float32", "bfloat16")

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def weight_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises UnsupportedModel for a tensor that Gemma 3 does not have.
    """
    stem = gguf_name.removesuffix(".weight")
    if stem in _TOP:
        return f"{_TOP[stem]}.weight"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is None or layer[2] not in _LAYER:
        raise UnsupportedModel(f"unknown tensor {gguf_name!r}: this is no Gemma 3 text model")
    return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.weight"


def convert(gguf_name: str, values: np.ndarray, dtype: str) -> tuple[str, np.ndarray]:
    """Return the name and the values, in `dtype`, that the folder stores for one GGUF tensor.

    `values` are the dequantized float32 values, in the model's own shape; they are not changed.
    """
    import ml_dtypes

    name = weight_name(gguf_name)
    if name.endswith("norm.weight"):
        values = values - 1  # GGUF stores the factor; Gemma's own files store the factor minus 1
    return name, values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, copy=False)


def read(tensors: list[Any], dtype: str) -> dict[str, np.ndarray]:
    """Dequantize and convert a GGUF reader's tensors. Holds all of them in memory (about 1 GB)."""
    from gguf.quants import dequantize

    return dict(
        convert(tensor.name, dequantize(tensor.data, tensor.tensor_type), dtype)
        for tensor in tensors
    )
