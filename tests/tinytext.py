"""Tiny tokenizers, and model folders that hold one, made in a moment and never downloaded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.trainers import BpeTrainer

CORPUS = (
    "The quick brown fox jumps over the lazy dog. Hello world, hello again! "
    "You are a helpful assistant. What is the capital of France? Paris is the capital. "
    "def main():\n    print('hello')\n\n\nuser assistant system tool: 0 1 2 3 4 5 6 7 8 9\n"
)

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


@cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    # Runs of newlines as one token that is not special, as several real models have them.
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    return str(tokenizer.to_str())


@cache
def _sentencepiece_json() -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    trainer = BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    return str(tokenizer.to_str())


def byte_level(chat_template: Any = None) -> Any:
    """A byte-level BPE tokenizer that puts nothing in front of a text."""
    return _wrapped(_byte_level_json(), chat_template)


def sentencepiece(chat_template: Any = None) -> Any:
    """A tokenizer in the manner of SentencePiece that puts <bos> in front."""
    return _wrapped(_sentencepiece_json(), chat_template)


def save_model(folder: Path, tokenizer: Any, **config: Any) -> Path:
    """A model folder without weights: `tokenizer` and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    facts = {"model_type": "llama", "vocab_size": len(tokenizer), **config}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def _wrapped(content: str, chat_template: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(content), bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
