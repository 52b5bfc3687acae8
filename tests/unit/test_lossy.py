"""Lossy caches end to end: stored, measured, restored and gone on from, on every kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle import as_loaded
from zoo import by_name, prompt

from kvq.cache.container import KVCacheContainer
from kvq.generate.iterator import TokenIterator
from kvq.generate.parameters import GenerateParameters
from kvq.prefill import Prefiller, PrefillOutcome, PrefillRequest
from kvq.prefill.gate import REPLAY_TOKENS
from kvq.store import Store
from kvq.store.keys import as_ids

#: Sliding windows, sinks, absorbed latents, hand-written attention, shared keys, attention chunks,
#: and recurrent layers beside attention and inside it.
MIXED = (
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "gemma2",
    "gemma4_text",
    "llama4",
    "falcon_h1",
    "qwen3_next",
)
TOKENS = 300


def store_prompt(
    folder: Path, name: str, codec: str, model: Any = None, **options: Any
) -> tuple[PrefillOutcome, Store, Any]:
    llm = as_loaded(by_name(name), model)
    store = Store.create(folder)
    ids = as_ids(prompt(by_name(name), TOKENS))
    request = PrefillRequest(token_ids=ids, name="one", codec=codec, **options)
    return Prefiller(store, llm, step=128).run(request), store, llm


def resume(store: Store, llm: Any, name: str, **options: Any) -> tuple[list[int], KVCacheContainer]:
    """Eight tokens after the stored prompt and two more tokens."""
    ids = prompt(by_name(name), TOKENS + 2)
    match = store.match(llm.fingerprint, ids)
    container = match.load(llm.model)
    assert container.tokens == TOKENS
    parameters = GenerateParameters(max_tokens=8, **options)
    return list(TokenIterator(ids[TOKENS:], llm.model, container, parameters)), container


@pytest.mark.parametrize("name", MIXED)
def test_every_kind_of_layer_is_stored_lossy_and_resumed(tmp_path: Path, name: str) -> None:
    exact, store, llm = store_prompt(tmp_path / "raw", name, "raw")
    expected, _ = resume(store, llm, name)
    sizes = {"raw": exact.bytes}
    for codec in ("q8", "q4"):
        outcome, store, llm = store_prompt(tmp_path / codec, name, codec)
        tokens, container = resume(store, llm, name)
        assert len(tokens) == 8
        assert outcome.quality is not None
        assert outcome.quality["tokens"] == REPLAY_TOKENS
        assert container.tokens == TOKENS + 2 + 8
        sizes[codec] = outcome.bytes
        if codec == "q8":
            assert outcome.quality["mean_kl"] < 0.01
            assert tokens[0] == expected[0]
    assert sizes["q4"] < sizes["q8"] < sizes["raw"]


@pytest.mark.parametrize("name", MIXED)
def test_what_was_restored_can_be_quantized_live(tmp_path: Path, name: str) -> None:
    _, store, llm = store_prompt(tmp_path, name, "q8")
    tokens, container = resume(store, llm, name, kv_bits=8)
    assert len(tokens) == 8
    assert {row.state for row in container.report} <= {"active", "skipped"}
    assert all(row.reason for row in container.report if row.state == "skipped")


def sharpened() -> Any:
    """A llama whose keys are so large that 4 bits leave attention to chance."""
    model = by_name("llama-64").build()
    for layer in model.layers:
        layer.self_attn.k_proj.weight = layer.self_attn.k_proj.weight * 6
    return model


def test_auto_takes_the_smallest_codec_that_passes_and_says_why(tmp_path: Path) -> None:
    easy, _, _ = store_prompt(tmp_path / "easy", "llama-64", "auto", max_kl=0.05)
    assert (easy.codec, easy.notes) == ("q4", ())
    hard, store, llm = store_prompt(tmp_path / "hard", "llama-64", "auto", sharpened(), max_kl=0.05)
    assert hard.codec == "q8"
    assert hard.quality is not None
    assert hard.quality["mean_kl"] < 0.05 < hard.quality["others"]["q4"]["mean_kl"]
    (note,) = hard.notes
    assert note.startswith("q4 changes the predictions by 0.")
    assert note.endswith("above 0.05: stored as q8")
    assert len(resume(store, llm, "llama-64")[0]) == 8
    none, _, _ = store_prompt(tmp_path / "none", "llama-64", "auto", sharpened(), max_kl=1e-6)
    assert none.codec == "raw"
    assert len(none.notes) == 2
