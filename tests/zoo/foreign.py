"""Models whose caches are no class of mlx-lm's cache module: kvq refuses them by name."""

from __future__ import annotations

from zoo.architecture import arch
from zoo.fields import EXPERTS

# fmt: off
FOREIGN = (
    arch("deepseek_v41", "LL", window=8, **EXPERTS, q_lora_rank=32, qk_rope_head_dim=16,
         o_groups=2, o_lora_rank=16, sliding_window=8, compress_ratios=[1, 4],
         kv_source_layer_ids=[0, 1], index_source_layer_ids=[0, 1], index_n_heads=2,
         index_head_dim=32, index_topk=8, hc_mult=2, hc_sinkhorn_iters=3),
)
