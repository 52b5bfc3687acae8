from __future__ import annotations

from typing import Any

import pytest

from kvq.errors import UnsupportedModel
from kvq_producer.sizes import known_codec, shape_of

MB = 1e6

# The fields that matter of the configs as published.
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_window_layers": 36,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
GEMMA3_4B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}
GEMMA3_12B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    },
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "token", "window", "sizes"),
    [
        (LLAMA_8B, 131_072, 0, (537, 147, 1074, 294, 4295, 1174)),
        (QWEN3_8B, 147_456, 0, (604, 165, 1208, 330, 4832, 1321)),
        (GEMMA3_4B, 20_480, 1024, (206, 56, 289, 79, 793, 217)),
        (GEMMA3_12B, 65_536, 1024, (604, 165, 872, 239, 2483, 679)),
        (GPT_OSS_20B, 24_576, 128, (104, 30, 204, 59, 808, 234)),
    ],
    ids=["llama-3.1-8b", "qwen3-8b", "gemma-3-4b", "gemma-3-12b", "gpt-oss-20b"],
)
def test_sizes_of_well_known_models(config, token, window, sizes):
    shape = shape_of(config)
    assert shape.kv_bytes("raw") == token
    assert shape.window_tokens == window
    assert shape.state_bytes == 0
    found = [
        shape.cache_bytes(codec, tokens) / MB
        for tokens in (4096, 8192, 32768)
        for codec in ("raw", "q4")
    ]
    assert found == pytest.approx(sizes, abs=0.5)


def test_what_does_not_grow_with_the_prompt():
    assert shape_of(LLAMA_8B).constant_bytes("raw") == 0
    assert shape_of(GEMMA3_4B).constant_bytes("raw") == pytest.approx(122 * MB, rel=0.01)
    assert shape_of(GEMMA3_12B).constant_bytes("raw") == pytest.approx(336 * MB, rel=0.01)
    assert shape_of(GPT_OSS_20B).constant_bytes("raw") == pytest.approx(3 * MB, rel=0.1)


def test_a_short_prompt_fills_only_part_of_its_windows():
    shape = shape_of(GEMMA3_4B)
    assert shape.cache_bytes("raw", 100) == 100 * (20_480 + shape.window_bytes("raw"))


def test_quantized_values_take_their_bits_and_a_share_of_scale_and_bias():
    shape = shape_of(LLAMA_8B)
    assert shape.kv_bytes("q8") == 131_072 * 8.5 / 16
    assert shape.kv_bytes("q4") == 131_072 * 4.375 / 16
    float32 = shape_of({**LLAMA_8B, "torch_dtype": "float32"})
    assert float32.kv_bytes("raw") == 262_144
    assert float32.kv_bytes("q8") == shape.kv_bytes("q8")
    assert (shape.logits_bytes, float32.logits_bytes) == (256_512, 513_024)
    assert [known_codec(name) for name in ("raw", "q4", "auto")] == ["raw", "q4", "q8"]


def test_latents_are_kept_once_for_all_heads():
    assert shape_of(DEEPSEEK_V3).kv_bytes("raw") == 61 * (512 + 64) * 2


def test_recurrent_layers_have_a_state_of_one_size():
    shape = shape_of(QWEN3_NEXT)
    assert shape.kv_bytes("raw") == 12 * 2 * 2 * 256 * 2
    inputs = 3 * (2 * 16 * 128 + 32 * 128)
    assert shape.state_bytes == 36 * (inputs * 2 + 32 * 128 * 128 * 4)
    assert shape.cache_bytes("q4", 0) == shape.constant_bytes("q4") == shape.state_bytes


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "llama", "num_hidden_layers": 2},
        {"model_type": "brand_new", **{k: v for k, v in LLAMA_8B.items() if k != "model_type"},
         "ssm_state_size": 16},
        {**LLAMA_8B, "model_type": "brand_new", "kv_lora_rank": 512},
        {**LLAMA_8B, "model_type": "openelm"},
        {**LLAMA_8B, "num_attention_heads": 0},
        {**GPT_OSS_20B, "layer_types": 7},
        {**QWEN3_NEXT, "linear_num_value_heads": "many"},
    ],
)  # fmt: skip
def test_a_config_that_does_not_tell_is_refused(config: dict[str, Any]):
    with pytest.raises(UnsupportedModel, match="model caches a token"):
        shape_of(config)


def test_a_new_architecture_with_plain_attention_is_taken_as_such():
    assert shape_of({**LLAMA_8B, "model_type": "brand_new"}).kv_bytes("raw") == 131_072


# Against the caches that mlx-lm really makes

mlx = pytest.importorskip("mlx.core")

from zoo import ARCHITECTURES  # noqa: E402


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_the_rules_agree_with_mlx_lm(architecture):
    try:
        shape = shape_of({**architecture.fresh_config(), "dtype": "float32"})
    except UnsupportedModel:
        assert architecture.name in NOT_TOLD
        return
    assert architecture.name not in NOT_TOLD
    kv, window, window_tokens, state = measure(architecture)
    assert shape.kv_bytes("raw") == kv
    assert shape.window_bytes("raw") == window
    assert shape.window_tokens == window_tokens
    assert shape.state_bytes == state


#: Architectures of which the size is said to be unknown.
NOT_TOLD = {
    "afm7",
    "baichuan_m1",
    "gear",
    "hunyuan",
    "iquestloopcoder",
    "longcat_flash_ngram",
    "minimax_m3_vl",
    "muse_glimmer",
    "nanbeige",
    "nemotron-nas",
    "openelm",
    "phixtral",
    "plamo2",
    "plamo3",
    "recurrent_gemma",
    "rwkv7",
    "spark2_5",
}


def measure(architecture) -> tuple[int, int, int, int]:
    """Bytes a token of full and of window layers, the window, and bytes of the states."""
    from mlx_lm.models.cache import make_prompt_cache

    from kvq.cache.leaves import describe, leaf_caches

    model = architecture.build()
    caches = make_prompt_cache(model)
    model(mlx.zeros((1, 3), mlx.uint32), cache=caches)
    mlx.eval([cache.state for cache in caches])
    leaves = describe(caches)
    found = {"kv": 0, "window": 0, "state": 0}
    for leaf, cache in zip(leaves, leaf_caches(caches), strict=True):
        if leaf.record == "state":
            found["state"] += sum(a.nbytes for a in cache.cache if a is not None)
        else:
            found[leaf.record] += 4 * sum(h * dim for h, dim in (leaf.keys, leaf.values))
    return found["kv"], found["window"], max(leaf.window for leaf in leaves), found["state"]
