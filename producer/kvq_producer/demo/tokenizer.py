"""The GGUF file's SentencePiece vocabulary as a `tokenizer.json`, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# SentencePiece's kinds of piece, as GGUF numbers them.
CONTROL, USER_DEFINED = 3, 4

_SPACE = "\u2581"


def merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The BPE merges that join text into `pieces` as SentencePiece does: best score first.

    SentencePiece joins the neighbours whose union is the piece of the highest score, whatever its
    halves; a BPE model joins by pairs in order of rank. So every split of a piece into two known
    pieces is a merge, ranked by the piece's score, then by the halves' ids.
    """
    ids = {piece: index for index, piece in enumerate(pieces)}
    found: list[tuple[float, int, int, int]] = []
    for index, piece in enumerate(pieces):
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    found.sort()
    return [(pieces[left], pieces[right]) for _, _, left, right in found]


def build(facts: Mapping[str, Any]) -> Any:
    """Return the `tokenizers.Tokenizer` of a GGUF file's metadata.

    It puts the beginning-of-text token in front where special tokens are asked for.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE

    pieces = facts["tokenizer.ggml.tokens"]
    kinds = facts["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(
        BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges(pieces, facts["tokenizer.ggml.scores"]),
            unk_token=pieces[facts["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    # mlx-lm knows this very decoder, and streams text faster with it.
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = facts["tokenizer.ggml.bos_token_id"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{pieces[bos]} $A",
        pair=f"{pieces[bos]} $A {pieces[bos]} $B",
        special_tokens=[(pieces[bos], bos)],
    )
    tokenizer.add_tokens(
        [
            AddedToken(piece, special=kind == CONTROL, normalized=False)
            for piece, kind in zip(pieces, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def tokenizer_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: transformers then takes tokenizer.json as it stands."""
    pieces = facts["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["gemma3.context_length"],
        "clean_up_tokenization_spaces": False,
        **{
            f"{name}_token": pieces[facts[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
        },
    }
