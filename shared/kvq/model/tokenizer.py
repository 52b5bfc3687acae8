"""Tokenizers: loading one from a model's folder, and text to token ids, many texts at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import MissingExtra, ModelNotFound, UnsupportedModel, UsageError
from kvq.store.keys import TokenIds

#: A tokenizer of transformers, or mlx-lm's wrapper around one.
Tokenizer = Any


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The transformers tokenizer of the model in `folder`; code in the folder is never run.

    Raises MissingExtra without transformers, ModelNotFound when tokenizer files are missing, and
    UnsupportedModel when they cannot be used.
    """
    auto = _auto_tokenizer()
    try:
        return auto.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    # transformers and the libraries below it raise whatever the files provoke.
    except Exception as error:
        names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
        if not any((Path(folder) / name).exists() for name in names):
            raise ModelNotFound(
                f"{folder} has no tokenizer ({', '.join(names)}): copy or download it again"
            ) from error
        raise UnsupportedModel(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """The transformers tokenizer inside mlx-lm's wrapper, or `tokenizer` itself."""
    if type(tokenizer).__name__ == "TokenizerWrapper":
        return tokenizer._tokenizer
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Token ids (uint32) of a prompt given as text, the same as mlx-lm's for that string.

    The tokenizer's own special tokens are put in front as it does for any text, but not when the
    text already begins with the beginning-of-text token. Raises UsageError when `text` holds half
    a surrogate pair.
    """
    return encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[TokenIds]:
    """`encode_text` of each of `texts`, in order; fast tokenizers use all cores."""
    bos = plain(tokenizer).bos_token
    begun = [bool(bos) and text.startswith(bos) for text in texts]
    if all(begun) or not any(begun):
        return encode(tokenizer, texts, add_special_tokens=not any(begun))
    bare = encode(tokenizer, [text for text, has in zip(texts, begun, strict=True) if has])
    other = encode(
        tokenizer,
        [text for text, has in zip(texts, begun, strict=True) if not has],
        add_special_tokens=True,
    )
    sources = iter(bare), iter(other)
    return [next(sources[0] if has else sources[1]) for has in begun]


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = False
) -> list[TokenIds]:
    """Token ids (uint32) of each of `texts`, adding no special tokens unless told to.

    Raises UsageError when one of them has no tokens.
    """
    check_text(*texts)
    backend = fast_backend(tokenizer)
    one_by_one = plain(tokenizer)
    try:
        if backend is not None:
            found = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [np.array(one.ids, dtype=np.uint32) for one in found]
        return [
            np.array(one_by_one.encode(one, add_special_tokens=add_special_tokens), dtype=np.uint32)
            for one in texts
        ]
    # The libraries raise bare exceptions, such as for a character that no token stands for.
    except Exception as error:
        raise UsageError(f"the model's tokenizer fails on this text: {error}") from error


def fast_backend(tokenizer: Tokenizer) -> Any | None:
    """The Rust tokenizer of a fast one, set to cut and pad nothing; None for a slow one."""
    hf = plain(tokenizer)
    backend = getattr(hf, "backend_tokenizer", None) if getattr(hf, "is_fast", False) else None
    if backend is not None:
        # What transformers sets at each call, too.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        split = bool(getattr(hf, "split_special_tokens", False))
        if backend.encode_special_tokens != split:
            backend.encode_special_tokens = split
    return backend


def check_text(*texts: str) -> None:
    """Raises UsageError when one of `texts` cannot be written as UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise UsageError(
                f"the text holds half a surrogate pair ({half}) at character {error.start + 1}: "
                "remove it or write the whole character"
            ) from error


def _auto_tokenizer() -> Any:
    # transformers advises at import to install PyTorch, which tokenizers do not need.
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("transformers", "producer") from error
    finally:
        if before is None:
            del os.environ[quiet]
        else:
            os.environ[quiet] = before
    return AutoTokenizer
