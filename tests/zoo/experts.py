"""Mixtures of experts whose every layer attends to all tokens."""

from __future__ import annotations

from zoo.architecture import arch
from zoo.fields import EXPERTS, TWO_HEADS

# fmt: off
EXPERTS = (
    arch("Klear", "KK", **EXPERTS, **TWO_HEADS),
    arch("bailing_moe", "KK", **EXPERTS, **TWO_HEADS),
    arch("dbrx", "KK", d_model=64, n_layers=2, n_heads=2,
         ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2,
                     "moe_jitter_eps": 0.0},
         attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0}),
    arch("deepseek", "KK", **EXPERTS, num_attention_heads=2, num_key_value_heads=2),
    arch("dots1", "KK", **EXPERTS),
    arch("ernie4_5_moe", "KK", use_bias=False, moe_num_experts=4, moe_layer_start_index=1,
         moe_intermediate_size=32, moe_k=2, moe_num_shared_experts=1),
    arch("glm4_moe", "KK", **EXPERTS, use_qk_norm=True, rope_scaling=None,
         partial_rotary_factor=0.5),
    arch("granitemoe", "KK", **EXPERTS, **TWO_HEADS, logits_scaling=2.0, attention_multiplier=0.2,
         embedding_multiplier=3.0, residual_multiplier=0.5),
    arch("hunyuan", "KKKK", num_hidden_layers=4, moe_topk=2, num_experts=4, num_shared_expert=1,
         use_mixed_mlp_moe=True, use_qk_norm=True, use_cla=True, cla_share_factor=2,
         rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, **TWO_HEADS,
         notes="every second layer reads the keys and values of the one before"),
    arch("minimax", "KK", **EXPERTS, rotary_dim=16, shared_intermediate_size=0),
    arch("mixtral", "KK", **EXPERTS, **TWO_HEADS),
    arch("olmoe", "KK", **EXPERTS, **TWO_HEADS),
    arch("phimoe", "KK", **EXPERTS, **TWO_HEADS, rope_scaling={
        "type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0] * 16,
        "short_mscale": 1.0, "long_mscale": 1.0}),
    arch("phixtral", "KK", num_vocab=288, model_dim=64, num_heads=2, num_layers=2, rotary_dim=16,
         num_local_experts=4, num_experts_per_tok=2),
    arch("qwen2_moe", "KK", **EXPERTS, **TWO_HEADS),
    arch("qwen3_moe", "KK", **EXPERTS),
    arch("qwen3_vl_moe", "KK", text_config={"model_type": "qwen3_moe", **EXPERTS}),
    arch("solar_open", "KK", **EXPERTS, use_qk_norm=True, rope_scaling=None,
         partial_rotary_factor=0.5),
)
