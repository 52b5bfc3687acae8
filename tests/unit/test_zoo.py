"""The zoo itself: its models are what their entries say, and depend on all of their context."""

from __future__ import annotations

import importlib
import pkgutil

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
import zoo
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from zoo import Architecture

EVERY = (*zoo.ARCHITECTURES, *zoo.FOREIGN)
LOADED = ("llama-64", "gemma3_text", "qwen3_next", "mamba2", "falcon_h1", "deepseek_v3")


def last_logits(model, ids: list[int], *cuts: int) -> np.ndarray:
    """Logits after the last of `ids`, fed to a new cache in chunks that end at `cuts`."""
    cache = make_prompt_cache(model)
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        logits = model(mx.array(ids[start:end])[None], cache=cache)
        mx.eval(logits, [entry.state for entry in cache])
    return np.array(logits[0, -1])


def relative(difference: np.ndarray, logits: np.ndarray) -> float:
    return float(np.abs(difference).max() / np.abs(logits).max())


def length(architecture: Architecture) -> int:
    """Tokens enough for every window to wrap."""
    return 16 + (architecture.window or 8)


@pytest.mark.parametrize("architecture", EVERY, ids=str)
def test_caches_are_as_declared(architecture: Architecture) -> None:
    cache = make_prompt_cache(architecture.build())
    assert zoo.layout(cache) == architecture.caches
    windows = {entry.max_size for entry in cache if isinstance(entry, RotatingKVCache)}
    assert windows <= {architecture.window}


@pytest.mark.parametrize("architecture", EVERY, ids=str)
def test_logits_do_not_depend_on_chunks(architecture: Architecture) -> None:
    model = architecture.build()
    ids = zoo.prompt(architecture, length(architecture))
    whole = last_logits(model, ids)
    assert whole.dtype == np.float32
    assert np.isfinite(whole).all()
    halves = last_logits(model, ids, len(ids) // 2)
    uneven = last_logits(model, ids, 5, 6, 17, len(ids) - 1)
    if architecture.chunk_free:
        assert relative(halves - whole, whole) < 1e-4
        assert relative(uneven - whole, whole) < 1e-4
    else:
        assert relative(uneven - whole, whole) > 1e-4


@pytest.mark.parametrize("architecture", EVERY, ids=str)
def test_the_first_token_reaches_the_last_logits(architecture: Architecture) -> None:
    model = architecture.build()
    ids = zoo.prompt(architecture, length(architecture))
    other = [3 if ids[0] != 3 else 4, *ids[1:]]
    whole = last_logits(model, ids)
    assert relative(last_logits(model, other) - whole, whole) > 1e-3


@pytest.mark.parametrize("name", ["llama-64", "gpt2", "mamba2"])
def test_two_builds_have_the_same_weights(name: str) -> None:
    architecture = zoo.by_name(name)
    mx.random.seed(1)
    first = dict(tree_flatten(architecture.build().parameters()))
    mx.random.seed(2)
    second = dict(tree_flatten(architecture.build().parameters()))
    assert first.keys() == second.keys()
    assert all(mx.array_equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", LOADED)
def test_a_folder_loads_to_the_same_model(name: str, tmp_path) -> None:
    architecture = zoo.by_name(name)
    model, tokenizer = load(str(zoo.save_folder(architecture, tmp_path / "model")))
    ids = zoo.prompt(architecture, length(architecture))
    assert np.array_equal(last_logits(model, ids), last_logits(architecture.build(), ids))
    text = "The theory of 10 café signs:\n  another."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < architecture.vocabulary


def test_a_folder_that_cannot_be_read_back_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="baichuan_m1"):
        zoo.save_folder(zoo.by_name("baichuan_m1"), tmp_path)


def test_every_module_of_mlx_lm_is_here_or_known_to_be_missing() -> None:
    modules = set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        if module.name in zoo.MISSING:
            continue
        if hasattr(importlib.import_module(f"mlx_lm.models.{module.name}"), "Model"):
            modules.add(module.name)
    assert modules - {entry.module for entry in EVERY} == set()


def test_prompts_grow_at_the_end() -> None:
    architecture = zoo.by_name("llama-64")
    assert zoo.prompt(architecture, 300)[:40] == zoo.prompt(architecture, 40)
    assert min(zoo.prompt(architecture, 300)) >= 3
    with pytest.raises(ValueError, match="4097"):
        zoo.prompt(architecture, 4097)
