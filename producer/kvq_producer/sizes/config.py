"""Reads a config.json whose fields have other names in every family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq.errors import UnsupportedModel

#: Where models of several parts keep the language model's config.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_RAW_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
#: What mlx-lm assumes where a config leaves a field out, by outer and by inner type.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 32,
    },
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma3_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "num_hidden_layers": 26,
    },
    "gemma4_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
    },
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": 36,
    },
}
#: Types whose heads share the hidden size whatever `head_dim` says.
_WITHOUT_HEAD_DIM = {"Klear", "apertus"}
#: The type of a text model whose config does not name one.
_TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


class Config:
    """The language model's part of a config.json."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        #: The type that the file names first, and the language model's own.
        self.outer_type = str(config.get("model_type", ""))
        fields = dict(config)
        while nested := next((n for k in _NESTED if isinstance(n := fields.get(k), Mapping)), None):
            fields = {k: v for k, v in fields.items() if k not in (*_NESTED, "model_type")}
            fields.update(nested)
        inner = str(fields.get("model_type") or self.outer_type)
        self.model_type = _TEXT_TYPES.get(inner, inner)
        defaults = _DEFAULTS.get(self.model_type, {}) | _DEFAULTS.get(self.outer_type, {})
        self._fields = {**defaults, **{k: v for k, v in fields.items() if v is not None}}

    def get(self, name: str) -> Any:
        """The field as it is, None when there is none."""
        return self._fields.get(name)

    def flag(self, name: str) -> bool:
        return bool(self._fields.get(name, False))

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of the fields `names` that is there. Raises UnsupportedModel when none is."""
        for name in names:
            value = self._fields.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        if default is None:
            raise UnsupportedModel(
                f"how much a {self.model_type or 'nameless'} model caches a token cannot be told: "
                f"its config has no {names[0]}"
            )
        return default

    @property
    def layers(self) -> int:
        return self.integer("n_layer", "n_layers", "num_layers", "num_hidden_layers")

    @property
    def query_heads(self) -> int:
        return self.integer("n_head", "n_heads", "num_heads", "num_attention_heads")

    @property
    def kv_heads(self) -> int:
        attention = self.get("attn_config")
        if isinstance(attention, Mapping) and attention.get("kv_n_heads"):
            return int(attention["kv_n_heads"])
        if self.flag("multi_query"):
            return 1
        if shared := self.get("n_shared_head"):
            return self.query_heads // int(shared)
        names = ("n_kv_heads", "num_kv_heads", "multi_query_group_num", "num_key_value_heads")
        return self.integer(*names, default=self.query_heads)

    @property
    def head_dim(self) -> int:
        hidden = self.integer("hidden_size", "n_embd", "d_model", "model_dim", default=0)
        share = hidden // self.query_heads
        if self.model_type in _WITHOUT_HEAD_DIM:
            return share
        return self.integer("head_dim", "kv_channels", default=share)

    @property
    def raw_bits(self) -> int:
        """Bits of a value as computed; 16 where the config does not say."""
        named = str(self.get("dtype") or self.get("torch_dtype") or "bfloat16")
        return _RAW_BITS.get(named.removeprefix("torch."), 16)
