"""Model folders on disk, for tests that start from a folder or another process."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from zoo.architecture import Architecture

_SPECIAL = ["<unk>", "<s>", "</s>"]
# A few merges, so that joining two texts can change the tokens at the seam, as in real models.
# (A space is written as that letter in byte-level vocabularies.)
_MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("\u0120", "the"),
    ("i", "n"),
    ("e", "r"),
    ("a", "n"),
    ("o", "n"),
]
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_folder(architecture: Architecture, path: Path | str) -> Path:
    """Write config.json, the weights and a byte-level tokenizer to `path`.

    `mlx_lm.load` reads the folder to a model whose logits equal those of `architecture.build()`.
    Raises ValueError for an architecture whose weights cannot be read back (`loadable` is False).
    """
    if not architecture.loadable:
        raise ValueError(f"mlx-lm cannot read back the weights of {architecture.name}")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(architecture.build().parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(architecture.fresh_config(), indent=2))
    tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": _TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return path


def tokenizer() -> Tokenizer:
    """Byte-level: one token a byte and a few merges, at most 288 ids; any text round-trips."""
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["".join(pair) for pair in _MERGES]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    result = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(_SPECIAL)
    return result
