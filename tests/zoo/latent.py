"""Models that cache latents (MLA), index keys, or the keys of other layers."""

from __future__ import annotations

from zoo.architecture import arch
from zoo.fields import EXPERTS, LATENTS, TWO_PAIRS

# fmt: off
_DEEPSEEK = {**EXPERTS, **LATENTS, "moe_layer_freq": 1}
_INDEX = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 16}
_LONGCAT = {**LATENTS, "num_layers": 2, "ffn_hidden_size": 96, "moe_topk": 2,
            "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "zero_expert_num": 2,
            "zero_expert_type": "identity", "attention_method": "MLA",
            "routed_scaling_factor": 1.0, "mla_scale_q_lora": True, "mla_scale_kv_lora": True}

LATENT = (
    arch("deepseek_v2", "KK", **_DEEPSEEK, rope_scaling={
         "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048,
         "mscale": 1.0, "mscale_all_dim": 1.0},
         notes="keys and values are expanded before caching"),
    arch("deepseek_v3", "KK", **_DEEPSEEK),
    arch("deepseek_v32", "(KK)(KK)", **_DEEPSEEK, **_INDEX),
    arch("glm4_moe_lite", "KK", **_DEEPSEEK),
    arch("glm_moe_dsa", "(KK)(KK)", **_DEEPSEEK, **_INDEX, topk_method="noaux_tc",
         scoring_func="sigmoid",
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    arch("kimi_k25", "KK", text_config={"model_type": "deepseek_v3", **_DEEPSEEK}),
    arch("kimi_vl", "KK", text_config={"model_type": "deepseek_v3", **_DEEPSEEK}),
    arch("longcat_flash", "(KK)(KK)", **_LONGCAT),
    arch("longcat_flash_ngram", "A(KK)(KK)", **_LONGCAT, ngram_vocab_size_ratio=4,
         emb_neighbor_num=3, emb_split_num=2),
    arch("minicpm3", "KK", **{**LATENTS, **TWO_PAIRS}, dim_model_base=32, scale_depth=1.4,
         scale_emb=2.0, rope_scaling={
         "type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0] * 16,
         "original_max_position_embeddings": 4096}),
    arch("minimax_m3_vl", "(K)(KK)", text_config={
        "model_type": "minimax_m3", "num_local_experts": 4, "num_experts_per_tok": 2,
        "dense_intermediate_size": 96, "shared_intermediate_size": 32, "intermediate_size": 32,
        "moe_layer_freq": [0, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_block_size": 8,
            "sparse_topk_blocks": 2, "sparse_local_block": 1, "sparse_attention_freq": [0, 1]}}),
    arch("mistral4", "KK", **_DEEPSEEK,
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                          "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}),
    arch("youtu_llm", "KK", **LATENTS),
    arch("afm7", "KK", hidden_dim=64, num_layers=4, num_kv_reuse_layers=2, num_heads=2,
         num_kv_heads=1, notes="the last layers read the keys and values of an earlier one"),
)
