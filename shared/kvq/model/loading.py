"""Loading a model with mlx-lm, together with what identifies it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce
from mlx_lm.utils import load as mlx_load

from kvq.errors import ModelNotFound, UnsupportedModel
from kvq.model.fingerprint import fingerprint
from kvq.model.folder import ModelFacts, read_facts, resolve


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in memory. `tokenizer` is mlx-lm's wrapper, `nbytes` the size of the weights."""

    name: str
    folder: Path
    fingerprint: str
    facts: ModelFacts
    nbytes: int
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)


def load(model: str, adapter: str | None = None) -> LoadedModel:
    """Load `model` (a local folder or a hub id), with an adapter folder if given.

    Never runs code that comes with a model. Raises ModelNotFound, UnsupportedModel.
    """
    folder = resolve(model)
    facts = read_facts(folder)
    try:
        loaded, tokenizer = mlx_load(
            str(folder), adapter_path=adapter, tokenizer_config={"trust_remote_code": False}
        )[:2]
    except FileNotFoundError as error:
        raise ModelNotFound(f"{model}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UnsupportedModel(
            f"mlx-lm cannot load {model} (model_type {facts.model_type!r}): {error}"
        ) from error
    return LoadedModel(
        name=model,
        folder=folder,
        fingerprint=fingerprint(folder, adapter),
        facts=facts,
        nbytes=weight_bytes(loaded),
        model=loaded,
        tokenizer=tokenizer,
    )


def weight_bytes(model: Any) -> int:
    """Bytes of a model's parameters."""

    def add(total: int, leaf: Any) -> int:
        return total + (leaf.nbytes if isinstance(leaf, mx.array) else 0)

    return int(tree_reduce(add, model.parameters(), 0))
