"""Models with recurrent layers, alone or beside attention."""

from __future__ import annotations

from zoo.architecture import arch
from zoo.fields import EXPERTS, FULL, LATENTS, LINEAR, SLIDING, TWO_HEADS

# fmt: off
_DELTA = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
          "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4}
_KIMI_LINEAR = {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4,
                "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
_KIMI = {**LATENTS, **EXPERTS, "num_hidden_layers": 4, "linear_attn_config": _KIMI_LINEAR,
         "model_max_length": 4096, "num_experts_per_token": 2}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_conv": 4,
           "mamba_n_groups": 1, "mamba_conv_bias": True, "mamba_proj_bias": False}
_LFM2 = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3,
         "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 32,
         "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "block_ff_dim": 96,
         "layer_types": ["conv", FULL, "conv"]}
_QWEN35 = {**_DELTA, "num_hidden_layers": 4, "rope_parameters": {
    "type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25}}

RECURRENT = (
    arch("baichuan_m1", "(AR)(AK)(AR)", window=8, num_hidden_layers=3, sliding_window=8,
         sliding_window_layers=[0, 2], conv_window=2, **TWO_HEADS, loadable=False),
    arch("bailing_hybrid", "AAAK", **LATENTS, **EXPERTS, num_hidden_layers=4, layer_group_size=4,
         group_norm_size=1, model_type="bailing_hybrid"),
    arch("bailing_moe_linear", "AAAK", **EXPERTS, num_hidden_layers=4, layer_group_size=4,
         group_norm_size=1),
    arch("bailing_moe_v3", "AAAK", **LATENTS, **EXPERTS, num_hidden_layers=4, layer_group_size=4,
         moe_shared_expert_intermediate_size=32, model_type="bailing_hybrid",
         architectures=["BailingMoeV3ForCausalLM"]),
    arch("falcon_h1", "(AK)(AK)", mamba_d_ssm=64, mamba_n_heads=2, mamba_d_head=32,
         mamba_d_state=16, mamba_chunk_size=16, tie_word_embeddings=True),
    arch("gear", "ARKA", window=8, num_hidden_layers=4, loadable=False, sliding_window=8,
         layer_types=["conv_mixer", SLIDING, FULL, "conv_mixer"]),
    arch("granitemoehybrid", "AAK", num_hidden_layers=3, **TWO_HEADS, **EXPERTS, **_MAMBA2,
         layer_types=["mamba", "mamba", "attention"], shared_intermediate_size=32,
         logits_scaling=2.0, attention_multiplier=0.2, embedding_multiplier=3.0,
         residual_multiplier=0.5),
    arch("jamba", "AAKA", num_hidden_layers=4, **TWO_HEADS, **EXPERTS, attn_layer_offset=2,
         attn_layer_period=4, expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4,
         mamba_d_state=16, mamba_expand=2),
    arch("kimi_k3", "AAAK", text_config={"model_type": "kimi_linear", **_KIMI,
         "hidden_act": "situ", "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0}),
    arch("kimi_linear", "AAAK", **_KIMI),
    arch("lfm2", "AKA", **_LFM2),
    arch("lfm2-vl", "AKA", text_config={"model_type": "lfm2", **_LFM2}),
    arch("lfm2_moe", "AKA", **{**_LFM2, **EXPERTS}, use_expert_bias=True, num_dense_layers=1),
    arch("mamba", "AA", intermediate_size=128, state_size=16, conv_kernel=4, use_bias=False,
         use_conv_bias=True, time_step_rank=4),
    arch("mamba2", "AA", num_heads=4, head_dim=32, intermediate_size=128, state_size=16,
         conv_kernel=4, n_groups=1, use_bias=False, use_conv_bias=True, time_step_rank="auto",
         time_step_limit=[0.0, 100.0]),
    arch("nemotron_h", "AKA", mamba_num_heads=4, mamba_head_dim=32, mamba_proj_bias=False,
         ssm_state_size=16, conv_kernel=4, n_groups=1, use_bias=False, use_conv_bias=True,
         hybrid_override_pattern=["M", "*", "-", "M"]),
    arch("olmo_hybrid", "AAK", num_hidden_layers=3, **_DELTA, linear_allow_neg_eigval=True,
         layer_types=[LINEAR, LINEAR, FULL]),
    arch("plamo2", "AKA", num_hidden_layers=3, hidden_size_per_head=32, mamba_d_state=16,
         mamba_num_heads=4, mamba_step=2, full_attention_idx=[1]),
    arch("qwen3_5", "AAAK", text_config={"model_type": "qwen3_5_text", **_QWEN35}),
    arch("qwen3_5_moe", "AAAK", text_config={"model_type": "qwen3_5_moe_text", **_QWEN35,
                                             **EXPERTS}),
    arch("qwen3_next", "AAAK", **_DELTA, **EXPERTS, num_hidden_layers=4,
         partial_rotary_factor=0.25),
    arch("recurrent_gemma", "AARA", window=8, num_hidden_layers=4, conv1d_width=4,
         logits_soft_cap=30.0, attention_window_size=8, **TWO_HEADS,
         block_types=["recurrent", "recurrent", "attention"]),
    arch("rwkv7", "AA", a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8,
         decay_low_rank_dim=8),
)
