"""The gate measures what a resume really gets, and its figures go where people look."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import zoo
from oracle import as_loaded

from kvq.cache import refill
from kvq.cache.refill import Transform
from kvq.codec import Codec
from kvq.codec.quality import measure
from kvq.model.loading import LoadedModel
from kvq.prefill import Prefiller, PrefillOutcome, PrefillRequest
from kvq.prefill.gate import REPLAY_TOKENS
from kvq.store import Store
from kvq.store.keys import BLOCK, TokenIds, as_ids

#: The replay begins where a block ends.
TOKENS = BLOCK + REPLAY_TOKENS


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def ids_for(llm: LoadedModel, tokens: int = TOKENS) -> TokenIds:
    return as_ids(zoo.prompt(zoo.by_name(llm.name), tokens))


def with_outliers() -> LoadedModel:
    """A small llama whose attention is sharp, and in whose keys one channel is far larger still."""
    llm = replace(as_loaded(zoo.by_name("llama-64")), fingerprint="with outliers")
    for layer in llm.model.layers:
        weight = layer.self_attn.k_proj.weight
        scale = mx.where(mx.arange(weight.shape[0]) % 64 == 5, 30.0, 6.0)
        layer.self_attn.k_proj.weight = weight * scale[:, None]
    return llm


def prefill(store: Store, llm: LoadedModel, codec: str, **options: object) -> PrefillOutcome:
    given = {"token_ids": ids_for(llm), "name": "one", **options}
    return Prefiller(store, llm, step=128).run(PrefillRequest(codec=codec, **given))


#: The replay begins in the middle of a block, and the windows there reach into others.
@pytest.mark.parametrize("tokens", [TOKENS, 600])
@pytest.mark.parametrize("codec", ["q8", "q4"])
@pytest.mark.parametrize("name", ["llama-64", "deepseek_v3", "gemma3_text", "gpt_oss", "falcon_h1"])
def test_the_figures_are_those_of_a_resume_from_the_stored_cache(
    store, name, codec, tokens
) -> None:
    llm = as_loaded(zoo.by_name(name))
    ids, start = ids_for(llm, tokens), tokens - REPLAY_TOKENS
    given = {"token_ids": ids, "window_records": "all", "keep": (start,)}
    outcome = prefill(store, llm, codec, **given)
    prefill(store, llm, "raw", name="exact", **given)

    def logits(codec: str) -> mx.array:
        match = store.match(llm.fingerprint, ids, codecs=[codec])
        caches = match.load(llm.model, upto=start)
        assert caches.tokens == start
        return llm.model(mx.array(ids[start:])[None], cache=caches)[0]

    again = measure(logits("raw"), logits(codec))
    assert outcome.quality is not None
    assert outcome.quality["tokens"] == again.tokens == REPLAY_TOKENS
    # The last bits differ, because the last token of a prompt is read alone.
    assert outcome.quality["mean_kl"] == pytest.approx(again.mean_kl, rel=0.02, abs=1e-8)
    assert outcome.quality["max_kl"] == pytest.approx(again.max_kl, rel=0.02, abs=1e-7)
    assert outcome.quality["top1"] == again.top1
    assert outcome.quality["mean_kl"] > 0


def test_the_manifest_has_them_as_json(store) -> None:
    outcome = prefill(store, with_outliers(), "auto", max_kl=0.05)
    text = (store.path / "caches" / "one.json").read_text()
    facts = json.loads(text)
    assert facts["quality"] == json.loads(json.dumps(outcome.quality))
    assert set(facts["quality"]) >= {"codec", "mean_kl", "max_kl", "top1", "tokens", "others"}
    assert facts["quality"]["codec"] == facts["codec"] == outcome.codec
    assert tuple(facts["notes"]) == outcome.notes


def test_outliers_make_auto_take_another_codec_and_say_why(store) -> None:
    plain = prefill(store, as_loaded(zoo.by_name("llama-64")), "auto", max_kl=0.05, name="plain")
    assert plain.codec == "q4"
    hard = prefill(store, with_outliers(), "auto", max_kl=0.05)
    assert hard.codec == "q8"
    assert hard.quality is not None
    assert hard.quality["mean_kl"] <= 0.05 < hard.quality["others"]["q4"]["mean_kl"]
    (note,) = hard.notes
    assert note.startswith("q4 changes the predictions by ")
    assert note.endswith(" nats, above 0.05: stored as q8")


def test_a_codec_is_measured_once_and_only_where_none_smaller_passes(store, monkeypatch) -> None:
    measured: list[str] = []

    def through(codec: Codec) -> Transform:
        measured.append(codec.name)
        return refill.through(codec)

    monkeypatch.setattr("kvq.prefill.gate.through", through)
    # Begins with q8, finds that q4 is good enough, and prefills again without a measurement.
    assert prefill(store, as_loaded(zoo.by_name("llama-64")), "auto", name="plain").codec == "q4"
    assert measured == ["q4"]
    assert prefill(store, with_outliers(), "auto").codec == "q8"
    assert measured == ["q4", "q4", "q8"]


def test_a_codec_that_was_asked_for_gives_way_to_a_better_one_too(store) -> None:
    llm = with_outliers()
    assert prefill(store, llm, "q4").codec == "q4"
    bounded = prefill(store, llm, "q4", max_kl=0.05)
    assert bounded.codec == "q8"
    assert store.manifest("one").codec == "q8"
    assert "stored as q8" in bounded.notes[-1]


def test_what_passed_once_is_not_computed_again(store) -> None:
    llm = with_outliers()
    first = prefill(store, llm, "auto", max_kl=0.05)
    second = prefill(store, llm, "auto", max_kl=0.05)
    assert (second.codec, second.quality, second.notes) == (first.codec, first.quality, first.notes)
    assert second.prefilled_tokens == 0
    # With a stricter limit it is measured and stored once more.
    third = prefill(store, llm, "auto", max_kl=1e-7)
    assert third.codec == "raw"
    assert third.prefilled_tokens > 0


def test_a_prompt_too_short_to_measure_is_stored_raw(store) -> None:
    llm = as_loaded(zoo.by_name("llama-64"))
    outcome = prefill(store, llm, "auto", token_ids=ids_for(llm, 3))
    assert (outcome.codec, outcome.quality) == ("raw", None)
    assert "too short to measure" in outcome.notes[-1]
    # Where no measurement was asked for, the codec stays.
    assert prefill(store, llm, "q8", token_ids=ids_for(llm, 3)).codec == "q8"


def test_raw_costs_no_measurement(store) -> None:
    assert prefill(store, as_loaded(zoo.by_name("llama-64")), "raw").quality is None


def test_tokens_computed_on_lossy_blocks_are_counted(tmp_path: Path) -> None:
    llm = as_loaded(zoo.by_name("llama-64"))
    store = Store.create(tmp_path / "store")
    prefill(store, llm, "q8", token_ids=ids_for(llm, 256), name="prefix")
    # Another process: nothing is in memory.
    after = prefill(store, llm, "q8")
    assert (after.reused_tokens, after.lossy_prefix_tokens) == (256, 256)
    assert store.manifest("one").lossy_prefix_tokens == 256
    # On exact blocks there is nothing to count.
    prefill(store, llm, "raw", token_ids=ids_for(llm, 256), name="prefix")
    assert prefill(store, llm, "raw").lossy_prefix_tokens == 0


def test_measuring_leaves_the_stored_rows_as_they_are(tmp_path: Path) -> None:
    llm = as_loaded(zoo.by_name("gemma3_text"))
    rows = []
    for folder, codec in (("measured", "q8"), ("plain", "raw")):
        store = Store.create(tmp_path / folder)
        prefill(store, llm, codec)
        caches = store.match(llm.fingerprint, ids_for(llm)).load(llm.model)
        rows.append(np.array(caches[-1].keys.astype(mx.float32)))
    scale = np.abs(rows[1]).max()
    assert np.abs(rows[0] - rows[1]).max() < 0.02 * scale


@pytest.mark.parametrize("tokens", [300, 768])
def test_a_replay_that_fails_costs_no_block(store, tokens, monkeypatch) -> None:
    llm = as_loaded(zoo.by_name("llama-64"))

    def failing(*_: object) -> mx.array:
        raise RuntimeError("no replay")

    with monkeypatch.context() as patch:
        patch.setattr("kvq.prefill.gate.Gate._logits", failing)
        with pytest.raises(RuntimeError, match="no replay"):
            prefill(store, llm, "q8", token_ids=ids_for(llm, tokens))
    again = prefill(store, llm, "q8", token_ids=ids_for(llm, tokens))
    assert (again.reused_tokens, again.prefilled_tokens) == (tokens, 0)
