"""From a model's config.json to what its cache holds, for the architectures that mlx-lm runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvq.errors import UnsupportedModel
from kvq_producer.sizes.config import Config
from kvq_producer.sizes.recurrent import STATES
from kvq_producer.sizes.shape import CacheShape, Rows

_FULL = {"full_attention", "attention"}
_SLIDING = {"sliding_attention", "chunked_attention"}

#: Wrappers whose models keep everything, whatever windows the config names.
_WITHOUT_WINDOWS = {"mistral3", "pixtral"}
#: Architectures that keep compressed latents, shared by all heads.
_LATENT = {
    "bailing_hybrid",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k3",
    "kimi_linear",
    "longcat_flash",
    "mistral4",
}
#: Those with a second row a token, by which they choose what to attend to.
_INDEXED = {"deepseek_v32", "glm_moe_dsa"}
#: Architectures that expand the latents before they keep them.
_EXPANDED = {"deepseek_v2", "minicpm3", "youtu_llm"}
#: Layouts that no rule here describes.
_UNKNOWN = {
    "afm7",
    "baichuan_m1",
    "deepseek_v41",
    "gear",
    "hunyuan",
    "iquestloopcoder",
    "longcat_flash_ngram",
    "minimax_m3",
    "minimax_m3_vl",
    "muse_glimmer",
    "muse_spark",
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
#: Fields of configs whose layers are not all plain attention.
_OTHER_LAYERS = (
    "attention_chunk_size",
    "conv_L_cache",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
)


def shape_of(config: Mapping[str, Any]) -> CacheShape:
    """What a model with this config.json keeps of a prompt.

    Raises UnsupportedModel when the config does not tell.
    """
    c = Config(config)
    if c.model_type in _UNKNOWN:
        raise UnsupportedModel(f"how much a {c.model_type} model caches a token is not known")
    try:
        return _shape(c)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"how much a {c.model_type} model caches a token cannot be told: "
            f"its config does not make sense ({error})"
        ) from error


def _shape(c: Config) -> CacheShape:
    kinds = [kind for kind in _kinds(c) if kind != "none"]
    kv, window = kinds.count("kv"), kinds.count("window")
    states = STATES.get(c.model_type)
    return CacheShape(
        kv=_rows(c, kv, windowed=False),
        window=_rows(c, window, windowed=True),
        window_tokens=_window(c) if window else 0,
        state_bytes=kinds.count("state") * states(c) // 8 if states else 0,
        logits=c.integer("vocab_size", default=0),
        raw_bits=c.raw_bits,
    )


def _rows(c: Config, layers: int, *, windowed: bool) -> tuple[Rows, ...]:
    if not layers:
        return ()
    heads, keys, values = _heads(c, windowed)
    rows = [Rows(layers=layers, heads=heads, keys=keys, values=values)]
    if c.model_type in _INDEXED:
        index = c.integer("index_head_dim")
        rows.append(Rows(layers=layers, heads=1, keys=index, values=index))
    return tuple(rows)


def _heads(c: Config, windowed: bool) -> tuple[int, int, int]:
    """Heads, and the dimensions of a key and a value, of one layer."""
    if c.model_type in _LATENT:
        return 1, c.integer("kv_lora_rank"), c.integer("qk_rope_head_dim")
    if c.model_type in _EXPANDED:
        keys = c.integer("qk_nope_head_dim") + c.integer("qk_rope_head_dim")
        heads = c.query_heads
        values = c.integer("v_head_dim", default=0) if c.model_type != "minicpm3" else 0
        return heads, keys, values or c.integer("hidden_size") // heads
    if c.model_type == "mimo_v2_flash":
        prefix = "swa_" if windowed else ""
        names = ("num_key_value_heads", "head_dim", "v_head_dim")
        heads, keys, values = (c.integer(prefix + name) for name in names)
        return heads, keys, values
    heads, dim = c.kv_heads, c.head_dim
    if c.model_type == "gemma4_text" and not windowed:
        dim = c.integer("global_head_dim", default=512)
        if c.flag("attention_k_eq_v"):
            heads = c.integer("num_global_key_value_heads", default=heads)
    if c.model_type == "step3p5":
        heads = c.integer("num_attention_groups")
        other = c.get("attention_other_setting")
        if windowed and isinstance(other, Mapping):
            heads = int(other["num_attention_groups"])
    return heads, dim, dim


def _window(c: Config) -> int:
    defaults = {"gemma3_text": 512, "gemma4_text": 512, "step3p5": 512, "gpt_oss": 128}
    default = defaults.get(c.model_type, 4096)
    names = ("sliding_window", "sliding_window_size", "attention_chunk_size")
    return c.integer(*names, default=default)


def _kinds(c: Config) -> list[str]:
    """The kind of each layer: kv, window, state, or none for a layer that keeps nothing.

    A layer with both attention and a recurrent part counts twice.
    """
    rule = _RULES.get(c.model_type) or _RULES.get(c.outer_type)
    if rule is None or c.outer_type in _WITHOUT_WINDOWS:
        _check_plain(c)
        return ["kv"] * c.layers
    return rule(c)


def _check_plain(c: Config) -> None:
    """Raise UnsupportedModel for a new architecture that does not look like plain attention."""
    latent = c.model_type in _LATENT | _EXPANDED
    odd = _OTHER_LAYERS if latent else (*_OTHER_LAYERS, "kv_lora_rank")
    named = [name for name in odd if c.get(name)]
    if named:
        raise UnsupportedModel(
            f"how much a {c.model_type or 'nameless'} model caches a token is not known "
            f"(its config has {named[0]})"
        )


def _by_name(default: Callable[[int], str] | None = None) -> Callable[[Config], list[str]]:
    """Rule: the config's layer_types, or what `default` says of layer i; else all full."""

    def kinds(c: Config) -> list[str]:
        names = c.get("layer_types") or c.get("layers_block_type")
        if not names:
            return [default(i) if default else "kv" for i in range(c.layers)]
        kept = c.layers - c.integer("num_kv_shared_layers", default=0)
        return [
            "kv" if name in _FULL else "window" if name in _SLIDING else "state"
            for name in names[:kept]
        ]

    return kinds


def _every(name: str, period: int, other: str) -> Callable[[Config], list[str]]:
    """Rule: the last of each `period` layers is full, where config may say `name` instead."""

    def kinds(c: Config) -> list[str]:
        every = c.integer(name, default=period)
        kept = c.layers - c.integer("num_kv_shared_layers", default=0)
        return ["kv" if (i + 1) % every == 0 else other for i in range(kept)]

    return kinds


def _gemma4(c: Config) -> list[str]:
    rule = _by_name() if c.get("layer_types") else _every("sliding_window_pattern", 5, "window")
    return rule(c)


def _exaone4(c: Config) -> list[str]:
    pattern = c.get("sliding_window_pattern") or "G"
    return ["window" if pattern[i % len(pattern)] == "L" else "kv" for i in range(c.layers)]


def _mimo(c: Config) -> list[str]:
    return ["window" if one else "kv" for one in c.get("hybrid_layer_pattern")]


def _nemotron(c: Config) -> list[str]:
    kinds = {"M": "state", "*": "kv"}
    return [kinds.get(one, "none") for one in c.get("hybrid_override_pattern")]


def _jamba(c: Config) -> list[str]:
    period, offset = c.integer("attn_layer_period"), c.integer("attn_layer_offset")
    return ["kv" if i % period == offset else "state" for i in range(c.layers)]


def _lfm2(c: Config) -> list[str]:
    full = c.get("full_attn_idxs")
    if full is None:
        return _by_name()(c)
    return ["kv" if i in full else "state" for i in range(c.layers)]


def _kimi_linear(c: Config) -> list[str]:
    linear = set(c.get("linear_attn_config")["kda_layers"])
    return ["state" if i + 1 in linear else "kv" for i in range(c.layers)]


def _bailing(c: Config) -> list[str]:
    group = c.integer("layer_group_size")
    whole = c.layers // group * group
    return ["kv" if (i + 1) % group == 0 or i >= whole else "state" for i in range(c.layers)]


_RULES: dict[str, Callable[[Config], list[str]]] = {
    "afmoe": _by_name(),
    "bailing_hybrid": _bailing,
    "bailing_moe_linear": _bailing,
    "cohere2": _every("sliding_window_pattern", 4, "window"),
    "exaone4": _exaone4,
    "exaone_moe": _by_name(),
    "falcon_h1": lambda c: ["kv", "state"] * c.layers,
    "gemma3_text": _every("sliding_window_pattern", 6, "window"),
    "gemma3n_text": _by_name(),
    "gemma4_text": _gemma4,
    "gpt_oss": _by_name(lambda i: "kv" if i % 2 else "window"),
    "granitemoehybrid": _by_name(),
    "jamba": _jamba,
    "kimi_k3": _kimi_linear,
    "kimi_linear": _kimi_linear,
    "laguna": _by_name(),
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama": _by_name(),
    "llama4": lambda c: ["kv" if (i + 1) % 4 == 0 else "window" for i in range(c.layers)],
    "longcat_flash": lambda c: ["kv", "kv"] * c.layers,
    "mamba": lambda c: ["state"] * c.layers,
    "mamba2": lambda c: ["state"] * c.layers,
    "mellum": _by_name(),
    "mimo_v2_flash": _mimo,
    "ministral3": _by_name(),
    "nemotron_h": _nemotron,
    "olmo3": _by_name(lambda i: "kv" if (i + 1) % 4 == 0 else "window"),
    "olmo_hybrid": _by_name(),
    "qwen3_5_text": _every("full_attention_interval", 4, "state"),
    "qwen3_5_moe_text": _every("full_attention_interval", 4, "state"),
    "qwen3_next": _every("full_attention_interval", 4, "state"),
    "step3p5": _by_name(),
}
