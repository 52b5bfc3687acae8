"""Dense models whose every layer attends to all tokens."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from zoo.architecture import arch
from zoo.fields import TWO_HEADS, TWO_PAIRS

_GPT = {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_ctx": 4096, "n_positions": 4096}


def _keep_all_logits(model: nn.Module) -> None:
    """Undo the mask over ids around 100,000, which would write outside a small vocabulary."""
    model._dummy_tokenizer_ids = mx.array([], dtype=mx.int32)


# fmt: off
PLAIN = (
    arch("llama-16", "KK", module="llama", head_dim=16, notes="head_dim 16: too small a group"),
    arch("llama-64", "KK", module="llama", head_dim=64, tie_word_embeddings=True),
    arch("llama-80", "KK", module="llama", head_dim=80, notes="head_dim 80: no group size divides"),
    arch("llama-96", "KK", module="llama", head_dim=96, notes="head_dim 96: groups of 32 only"),
    arch("apertus", "KK", **TWO_HEADS, post_norm=False, qk_norm=True),
    arch("cohere", "KK", **TWO_HEADS, use_qk_norm=True, logit_scale=0.5),
    arch("ernie4_5", "KK", use_bias=False),
    arch("exaone", "KK", **TWO_HEADS, num_layers=2),
    arch("gemma", "KK"),
    arch("gemma2", "KK", query_pre_attn_scalar=32),
    arch("glm", "KK"),
    arch("glm4", "KK", partial_rotary_factor=0.5),
    arch("gpt2", "KK", **_GPT),
    arch("gpt_bigcode", "KK", **_GPT, n_inner=96),
    arch("gpt_neox", "KK", **TWO_PAIRS, rotary_emb_base=10000, rotary_pct=0.5),
    arch("gptj", "KK", **_GPT, rotary_dim=16),
    arch("granite", "KK", **TWO_HEADS, logits_scaling=2.0, attention_multiplier=0.2,
         embedding_multiplier=3.0, residual_multiplier=0.5),
    arch("helium", "KK", **TWO_HEADS),
    arch("hunyuan_v1_dense", "KK", use_qk_norm=True),
    arch("internlm2", "KK", **TWO_HEADS),
    arch("internlm3", "KK", **TWO_HEADS),
    arch("lille-130m", "KK", n_embd=64, n_head=2, n_kv_heads=1, n_layer=2, block_size=4096),
    arch("llama4_text", "KKKK", num_hidden_layers=4, intermediate_size_mlp=96,
         no_rope_layers=[1, 1, 1, 0], use_qk_norm=True),
    arch("mimo", "KK", **TWO_HEADS, num_nextn_predict_layers=0),
    arch("minicpm", "KK", **TWO_HEADS, dim_model_base=32, scale_depth=1.4, scale_emb=2.0),
    arch("nanbeige", "KKKK", num_loops=2, notes="two passes over the layers, a cache for each"),
    arch("nanochat", "KK", **TWO_PAIRS),
    arch("nemotron", "KK", hidden_act="relu2"),
    arch("nemotron-nas", "KK", **TWO_HEADS, num_hidden_layers=3, block_configs=[
        {"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
    ], notes="a layer without attention has no cache"),
    arch("olmo2", "KK"),
    arch("openelm", "KK", num_transformer_layers=2, model_dim=64, ffn_dim_divisor=16,
         num_query_heads=[4, 4], num_kv_heads=[2, 4], ffn_multipliers=[1.0, 2.0],
         notes="key-value heads differ from layer to layer"),
    arch("phi", "KK", **TWO_PAIRS),
    arch("phi3", "KK", **TWO_HEADS),
    arch("phi3small", "KK", **TWO_HEADS, dense_attention_every_n_layers=2, ff_intermediate_size=96,
         gegelu_limit=20.0, blocksparse_block_size=32, blocksparse_num_local_blocks=1,
         blocksparse_vert_stride=2, chunk_free=False, loadable=False,
         adjust=_keep_all_logits,
         notes="mlx-lm adds its boolean mask to the scores, so tokens of one chunk see each other"),
    arch("pixtral", "KK", text_config={"model_type": "llama"}),
    arch("plamo", "KK", **TWO_HEADS, n_shared_head=2),
    arch("qwen", "KK", **TWO_PAIRS, kv_channels=32, no_bias=True),
    arch("qwen2", "KK", **TWO_HEADS),
    arch("qwen2_vl", "KK", text_config={"model_type": "qwen2", **TWO_HEADS}),
    arch("qwen3", "KK"),
    arch("qwen3_vl", "KK", text_config={"model_type": "qwen3"}),
    arch("seed_oss", "KK"),
    arch("smollm3", "KKKK", num_hidden_layers=4),
    arch("stablelm", "KK", **TWO_HEADS, use_qkv_bias=True, partial_rotary_factor=0.25),
    arch("starcoder2", "KK", **TWO_HEADS),
    arch("talkie", "KK", **TWO_PAIRS),
    arch("telechat3", "KK"),
)
