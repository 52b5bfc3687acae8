"""From a model's name to its folder, and the facts that its config states."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import MissingExtra, ModelNotFound, UnknownToken
from kvq.store.keys import TokenIds

_TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "*.tiktoken"]
_WEIGHT_FILES = ["model*.safetensors"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)

#: Keys that state the context length, the most trusted first.
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "n_ctx",
)
#: Tokenizers without a limit state one of about 10**30.
_ABSURD_CONTEXT = 10**9
#: Where models of several parts keep the language model's config.
_NESTED_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a model's config says about its prompts.

    `context_tokens` is None when the config states no limit; `vocab_size` is the number of rows of
    the embedding, None when unstated.
    """

    model_type: str
    context_tokens: int | None
    vocab_size: int | None

    def check_vocabulary(self, ids: TokenIds) -> None:
        """Raise UnknownToken when the embedding has no row for one of `ids`.

        The device would read behind its end.
        """
        if self.vocab_size is None or not len(ids):
            return
        foreign = np.asarray(ids) >= self.vocab_size
        if not foreign.any():
            return
        at = int(np.argmax(foreign))
        raise UnknownToken(
            f"token id {ids[at]} (number {at + 1}) is not in the model's vocabulary "
            f"of {self.vocab_size}"
        )


def resolve(model: str, *, weights: bool = True) -> Path:
    """The local folder of `model`: itself when it is one, otherwise the hub's copy of that id.

    A hub id is downloaded once and found in the hub's cache afterwards; `weights=False` leaves
    the weights out and fetches only configs, tokenizers and templates. With HF_HUB_OFFLINE set
    only the cache is looked at. Raises ModelNotFound, saying what to do, whatever goes wrong;
    MissingExtra when a hub id is given and `huggingface_hub` is not installed.
    """
    if not isinstance(model, str) or not model.strip() or "\0" in model:
        raise ModelNotFound(f"{model!r} is not a model: give a local folder or a hub id (org/name)")
    folder = Path(model).expanduser()
    if folder.exists():
        return _checked(folder, model, weights)
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFound(
            f"no model folder at {model!r}: check the path, and that its disk or share is mounted"
        )
    return _checked(_download(model, weights), model, weights)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The model's config.json. Raises ModelNotFound when it is missing or not an object."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelNotFound(
            f"{folder} has no config.json: give a model folder in the Hugging Face layout"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} cannot be read ({error}): copy the model again") from error
    if not isinstance(config, dict):
        raise ModelNotFound(f"{path} holds no JSON object: copy the model again")
    return config


def read_facts(folder: str | Path) -> ModelFacts:
    """The facts that `folder`'s config states. Raises ModelNotFound when there is no config."""
    config = read_config(folder)
    parts = list(_language_configs(config))
    contexts = [context for part in parts if (context := _context(part)) is not None]
    sizes = [size for part in parts if (size := _positive(part.get("vocab_size"))) is not None]
    context = contexts[0] if contexts else _tokenizer_limit(Path(folder))
    return ModelFacts(
        model_type=str(config.get("model_type", "")),
        context_tokens=context,
        vocab_size=sizes[0] if sizes else None,
    )


def _checked(folder: Path, model: str, weights: bool) -> Path:
    if not folder.is_dir():
        raise ModelNotFound(f"{model!r} is a file: give the folder that holds config.json")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{model!r} has no config.json: give a model folder in the Hugging Face layout"
        )
    if weights and not any(folder.glob("model*.safetensors")):
        raise ModelNotFound(
            f"{model!r} has no model*.safetensors: download its weights, "
            "or convert it with mlx_lm.convert"
        )
    return folder


def _download(model: str, weights: bool) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "producer") from error
    offline = constants.HF_HUB_OFFLINE or _is_set("HF_HUB_OFFLINE")
    try:
        found = huggingface_hub.snapshot_download(
            model,
            allow_patterns=_TOKENIZER_FILES + (_WEIGHT_FILES if weights else []),
            local_files_only=offline,
        )
    # The hub's client raises its own errors, those of its HTTP library, OSError and ValueError:
    # to the caller all of them mean that the model cannot be had.
    except Exception as error:
        if isinstance(error, errors.GatedRepoError):
            advice = "ask for access on its page and log in with `hf auth login`"
        elif isinstance(error, errors.RepositoryNotFoundError):
            advice = "no hub has it: check the spelling, or log in with `hf auth login`"
        elif offline:
            advice = "it is not in the cache, and HF_HUB_OFFLINE forbids a download: unset it once"
        elif isinstance(error, errors.LocalEntryNotFoundError):
            advice = "the hub cannot be reached and the cache has no copy: check the network"
        else:
            advice = f"the download failed ({error})"
        raise ModelNotFound(
            f"no folder {model!r}, and as a hub id: {advice}, or give a local folder"
        ) from error
    return Path(found)


def _language_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for key in _NESTED_CONFIGS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            yield from _language_configs(nested)


def _context(config: Mapping[str, Any]) -> int | None:
    stated = next((n for key in _CONTEXT_KEYS if (n := _positive(config.get(key)))), None)
    if stated is None:
        return None
    # A rope that was stretched may leave the unstretched length in the plain key.
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key)
        if isinstance(scaling, Mapping):
            factor = scaling.get("factor")
            original = _positive(scaling.get("original_max_position_embeddings"))
            if original and isinstance(factor, int | float) and 1 <= factor < 10**4:
                stated = max(stated, int(original * factor))
    return stated


def _tokenizer_limit(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return _positive(config.get("model_max_length")) if isinstance(config, dict) else None


def _positive(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 1 <= value < _ABSURD_CONTEXT else None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").strip().upper() in {"1", "ON", "YES", "TRUE"}
