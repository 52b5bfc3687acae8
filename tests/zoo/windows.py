"""Models with sliding windows or attention chunks, small enough to wrap within a short prompt."""

from __future__ import annotations

from zoo.architecture import arch
from zoo.fields import EXPERTS, FULL, SLIDING, TWO_HEADS

# fmt: off
_MIX = [SLIDING, SLIDING, FULL, SLIDING]
_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 10000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
}
_GEMMA3 = {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 3,
           "query_pre_attn_scalar": 32}
_GEMMA4 = {"num_hidden_layers": 6, "global_head_dim": 64, "num_kv_shared_layers": 2,
           "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 288,
           "sliding_window": 8, "num_key_value_heads": 1,
           "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]}

WINDOWS = (
    arch("afmoe", "RRKR", window=8, num_hidden_layers=4, layer_types=_MIX, sliding_window=8,
         **EXPERTS, num_dense_layers=1),
    arch("cohere2", "RRRK", window=8, num_hidden_layers=4, sliding_window=8, logit_scale=0.5,
         **TWO_HEADS),
    arch("exaone4", "RRRK", window=8, num_hidden_layers=4, sliding_window=8,
         sliding_window_pattern="LLLG", rope_scaling=None,
         layer_types=[SLIDING] * 3 + [FULL]),
    arch("exaone_moe", "RRKR", window=8, num_hidden_layers=4, layer_types=_MIX, sliding_window=8,
         is_moe_layer=[False, True, True, True], **EXPERTS),
    arch("gemma3", "RRKR", window=8, text_config={"model_type": "gemma3_text", **_GEMMA3}),
    arch("gemma3_text", "RRKR", window=8, **_GEMMA3),
    arch("gemma3_text-32", "RRKR", module="gemma3_text", window=32,
         **{**_GEMMA3, "sliding_window": 32}),
    arch("gemma3n", "RRKR", window=8, text_config={
        "model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 288, "hidden_size_per_layer_input": 16,
        "sliding_window": 8, "rope_local_base_freq": 1000.0, "final_logit_softcapping": 30.0,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0], "altup_num_inputs": 3,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
        "laurel_rank": 8, "intermediate_size": [96] * 6,
    }, notes="the last layers read the keys and values of earlier ones"),
    arch("gemma4", "RRKR", window=8, text_config={"model_type": "gemma4_text", **_GEMMA4}),
    arch("gemma4_text", "RRKR", window=8, **_GEMMA4,
         notes="the last layers read the keys and values of earlier ones"),
    arch("gpt_oss", "RKRK", window=8, num_hidden_layers=4, sliding_window=8, **EXPERTS,
         layer_types=[SLIDING, FULL] * 2, notes="attention sinks"),
    arch("iquestloopcoder", "KKRR", window=8, loop_num=2, loop_window_size=8,
         notes="two passes over the layers, a cache for each"),
    arch("laguna", "RRKR", window=8, num_hidden_layers=4, layer_types=_MIX, sliding_window=8,
         **EXPERTS, rope_parameters=_ROPE),
    arch("llama-sliding", "RRKR", module="llama", window=8, num_hidden_layers=4, layer_types=_MIX,
         sliding_window=8),
    arch("llama-sliding-32", "RKR", module="llama", window=32, num_hidden_layers=3,
         layer_types=[SLIDING, FULL, SLIDING], sliding_window=32),
    arch("llama4", "CCCK", window=8, text_config={
        "model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96, "num_local_experts": 4,
        "num_experts_per_tok": 1, "use_qk_norm": True, "rope_scaling": None}),
    arch("mellum", "RRKR", window=8, num_hidden_layers=4, layer_types=_MIX, sliding_window=8,
         **EXPERTS, rope_parameters=_ROPE),
    arch("mimo_v2_flash", "RRKR", window=8, num_hidden_layers=4, hybrid_layer_pattern=[1, 1, 0, 1],
         moe_layer_freq=[0, 1, 1, 1], add_swa_attention_sink_bias=True,
         add_full_attention_sink_bias=False, sliding_window_size=8, **EXPERTS,
         topk_method="noaux_tc", scoring_func="sigmoid", layernorm_epsilon=1e-5,
         swa_rope_theta=1000.0, swa_num_attention_heads=4, swa_num_key_value_heads=1,
         v_head_dim=32, swa_head_dim=32, swa_v_head_dim=32, partial_rotary_factor=0.5,
         notes="attention sinks in the sliding layers"),
    arch("ministral3", "RRKR", window=8, num_hidden_layers=4, layer_types=_MIX, sliding_window=8,
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                          "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}),
    arch("mistral3", "KKKK", window=8, text_config={
        "model_type": "ministral3", "num_hidden_layers": 4, "layer_types": _MIX,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}}),
    arch("muse_glimmer", "RRRK", window=8, num_hidden_layers=4, sliding_window=8),
    arch("olmo3", "RRRK", window=8, num_hidden_layers=4, sliding_window=8),
    arch("plamo3", "RRRK", window=8, num_hidden_layers=4, window_size=8,
         sliding_window_pattern=4, chunk_free=False,
         notes="mlx-lm masks one token more than it caches"),
    arch("spark2_5", "RRRK", window=8, num_hidden_layers=4, sliding_window=8,
         rope_parameters=_ROPE),
    arch("step3p5", "RRKR", window=8, num_hidden_layers=4, layer_types=_MIX, sliding_window=8,
         num_attention_groups=2, moe_num_experts=4, moe_top_k=2, moe_intermediate_size=32,
         share_expert_dim=32, moe_layers_enum="1,2,3",
         attention_other_setting={"num_attention_heads": 4, "num_attention_groups": 1}),
)
