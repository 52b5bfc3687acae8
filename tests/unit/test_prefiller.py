"""The prefill of a prompt: what it reuses, what it leaves behind, and how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import as_loaded
from zoo import by_name, prompt

from kvq.errors import PromptTooLong, Stopped, StoreUnavailable, UnknownToken
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store
from kvq.store.blockfile import read_data, read_header
from kvq.store.keys import as_ids
from kvq.store.writer import Writer

STEP = 128


def make(tmp_path: Path, name: str = "llama-16", **options: int) -> Prefiller:
    return Prefiller(
        Store.create(tmp_path / "store"), as_loaded(by_name(name)), step=STEP, **options
    )


def ids_of(name: str, n: int) -> np.ndarray:
    return as_ids(prompt(by_name(name), n))


def ask(ids: np.ndarray, name: str | None = "one", **options: object) -> PrefillRequest:
    return PrefillRequest(token_ids=ids, name=name, **{"codec": "raw", **options})


def files(prefiller: Prefiller, pattern: str = "*.safetensors") -> list[str]:
    return sorted(path.name for path in prefiller.store.path.rglob(pattern))


class StopAfter:
    """Ends a prefill at the first chunk that reaches `tokens`."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, done: int, total: int) -> None:
        if done >= self.tokens:
            raise Stopped("the test says so", done)


@pytest.mark.parametrize("name", ["llama-16", "gemma3_text", "qwen3_next", "falcon_h1", "llama4"])
def test_a_stopped_prefill_goes_on_from_its_last_block(tmp_path: Path, name: str) -> None:
    ids = ids_of(name, 1500)
    calm = make(tmp_path / "calm", name).run(ask(ids))
    stopped = make(tmp_path, name)
    with pytest.raises(Stopped):
        stopped.run(ask(ids), on_chunk=StopAfter(1100))
    again = make(tmp_path, name).run(ask(ids))
    assert again.reused_tokens >= 1024
    assert again.reused_tokens + again.prefilled_tokens == calm.tokens == 1500
    assert files(stopped, "*.ckpt.*") == []
    # Whatever was interrupted, the store ends up with the same blocks.
    assert files(stopped) == files(make(tmp_path / "calm", name))
    for path in stopped.store.path.rglob("*.safetensors"):
        read_data(read_header(path))  # raises where a digest does not hold


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_a_checkpoint_stays_until_there_is_a_later_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Writer.submit

    def at_once(writer: Writer, *given: Any, **options: Any) -> None:
        submit(writer, *given, **options)
        for future in writer._futures:
            future.result()

    monkeypatch.setattr(Writer, "submit", at_once)
    ids = ids_of(name, 4096)
    prefiller = make(tmp_path, name)
    prefiller.step = 2048
    with pytest.raises(Stopped):
        prefiller.run(ask(ids), on_chunk=StopAfter(2048))
    assert prefiller.run(ask(ids)).reused_tokens == 2048
    assert files(prefiller, "*.ckpt.*") == []


def test_the_device_has_a_chunk_to_do_while_the_one_before_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller = make(tmp_path)
    prefiller.spaces.of("raw")
    events: list[str] = []
    kind = type(prefiller.llm.model)
    call = kind.__call__

    def watched(model: Any, ids: Any, **options: Any) -> Any:
        events.append(f"computes {ids.shape[1]}")
        return call(model, ids, **options)

    monkeypatch.setattr(kind, "__call__", watched)
    prefiller.run(
        ask(ids_of("llama-16", 3 * STEP + 1)),
        on_chunk=lambda done, total: events.append(f"{done} done"),
    )
    assert events == [
        "0 done",
        *("computes 128", "computes 128", "128 done"),
        *("computes 128", "256 done"),
        *("computes 1", "384 done", "385 done"),
    ]


def test_a_second_run_computes_nothing(tmp_path: Path) -> None:
    ids = ids_of("gemma3_text", 300)
    first = make(tmp_path, "gemma3_text").run(ask(ids))
    second = make(tmp_path, "gemma3_text").run(ask(ids, "other"))
    assert (second.reused_tokens, second.prefilled_tokens, second.bytes_written) == (300, 0, 0)
    assert second.bytes == first.bytes
    assert make(tmp_path, "gemma3_text").store.names() == ["one", "other"]


def test_prompts_that_share_a_prefix_share_its_blocks(tmp_path: Path) -> None:
    prefiller = make(tmp_path)
    shared = ids_of("llama-16", 512)
    for number in range(3):
        tail = np.full(40, number + 3, np.uint32)
        outcome = prefiller.run(ask(np.concatenate([shared, tail]), f"prompt-{number}"))
        assert outcome.reused_tokens == (512 if number else 0)
    # Two full blocks once, three tails and their logits.
    assert len(files(prefiller)) == 2 + 3 + 3


def test_a_prefix_job_leaves_no_manifest_and_serves_its_children_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of("qwen3_next", 400)
    prefiller = make(tmp_path, "qwen3_next")
    prefix = prefiller.run(ask(ids[:300], None))
    assert prefiller.store.names() == []
    assert prefix.tokens == 300
    monkeypatch.setattr("kvq.store.match.Match.load", None)  # nothing may be read from the store
    child = prefiller.run(ask(ids, "child"))
    assert (child.reused_tokens, child.lossy_prefix_tokens) == (300, 0)


def test_a_lossy_prefix_read_from_the_store_is_counted(tmp_path: Path) -> None:
    ids = ids_of("llama-64", 400)
    make(tmp_path, "llama-64").run(ask(ids[:256], None, codec="q8"))
    outcome = make(tmp_path, "llama-64").run(ask(ids, "child", codec="q8"))
    assert (outcome.reused_tokens, outcome.lossy_prefix_tokens) == (256, 256)
    assert make(tmp_path, "llama-64").store.manifest("child").lossy_prefix_tokens == 256


def test_windows_are_kept_near_kept_positions_only(tmp_path: Path) -> None:
    ids = ids_of("gemma3_text", 2000)
    kept = make(tmp_path / "kept", "gemma3_text")
    kept.run(ask(ids))
    every = make(tmp_path / "all", "gemma3_text")
    every.run(ask(ids, window_records="all"))
    few, many = files(kept, "*.window.safetensors"), files(every, "*.window.safetensors")
    assert len(many) == 8
    assert set(few) < set(many)
    assert len(few) == 3


def test_asked_positions_of_a_recurrent_model_can_be_restored(tmp_path: Path) -> None:
    ids = ids_of("mamba2", 600)
    prefiller = make(tmp_path, "mamba2")
    prefiller.run(ask(ids, keep=(100,), keep_every=250))
    store, fingerprint = prefiller.store, prefiller.llm.fingerprint
    for asked, found in ((600, 600), (599, 512), (500, 500), (499, 250), (249, 100), (99, 0)):
        assert store.match(fingerprint, ids[:asked]).tokens == found


def test_a_prompt_beyond_the_context_is_refused_before_any_work(tmp_path: Path) -> None:
    prefiller = make(tmp_path)
    facts = prefiller.llm.facts
    object.__setattr__(facts, "context_tokens", 100)
    with pytest.raises(PromptTooLong, match="has 101 tokens, the model's context is 100"):
        prefiller.run(ask(ids_of("llama-16", 101)))
    with pytest.raises(PromptTooLong, match="no tokens"):
        prefiller.run(ask(ids_of("llama-16", 0)))
    assert files(prefiller) == []


def test_a_token_that_the_model_does_not_have_is_refused_before_any_work(tmp_path: Path) -> None:
    prefiller = make(tmp_path)
    object.__setattr__(prefiller.llm.facts, "vocab_size", 200)
    ids = np.array([1, 2, 200, 3, 201], np.uint32)
    with pytest.raises(UnknownToken, match=r"token id 200 \(number 3\) is not in .* of 200"):
        prefiller.run(ask(ids))
    assert files(prefiller) == []


def test_a_swapped_store_is_not_written_to(tmp_path: Path) -> None:
    prefiller = make(tmp_path)
    prefiller.store.path.rename(tmp_path / "elsewhere")
    prefiller.store.path.mkdir()
    with pytest.raises(StoreUnavailable, match="mounted"):
        prefiller.run(ask(ids_of("llama-16", 300)))
    assert list(prefiller.store.path.iterdir()) == []


def test_ttl_pin_and_metadata_stand_in_the_manifest(tmp_path: Path) -> None:
    prefiller = make(tmp_path)
    request = ask(ids_of("llama-16", 20), ttl=60.0, pin=True, metadata={"a": [1, "é"]}, worker="w")
    prefiller.run(request)
    manifest = prefiller.store.manifest("one")
    assert manifest.expires == pytest.approx(manifest.created + 60)
    assert (manifest.pinned, manifest.metadata, manifest.worker) == (True, {"a": [1, "é"]}, "w")
    assert manifest.kept == (20,)
