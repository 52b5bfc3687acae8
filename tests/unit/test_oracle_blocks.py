"""Prompts of several blocks: cuts at their boundaries and inside, and in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
import zoo
from mlx_lm.models.cache import make_prompt_cache
from oracle import ROUNDING, Bench, as_loaded, deviation, feed

from kvq.errors import CannotTrim, Stopped
from kvq.model.loading import load
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import End, Store

STEP = 64
TOKENS = 600
KEPT = 300
#: One and more of each kind of cache.
NAMES = (
    "llama-64", "hunyuan", "deepseek_v3", "deepseek_v32", "minimax_m3_vl", "afm7",
    "gemma3_text", "gemma3_text-32", "gemma3n", "gpt_oss", "iquestloopcoder", "llama4",
    "longcat_flash_ngram", "qwen3_next", "falcon_h1", "mamba2", "baichuan_m1", "gear",
    "recurrent_gemma", "rwkv7",
)  # fmt: skip
LOADED = ("llama-64", "gemma3_text", "qwen3_next", "mamba2", "falcon_h1", "deepseek_v3", "llama4")


@pytest.fixture(scope="module", autouse=True)
def no_flushes() -> Iterator[None]:
    """No power cut happens in here, and the disk is most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)
        yield


@pytest.fixture(scope="module", params=NAMES)
def bench(request, tmp_path_factory) -> Bench:
    """Three blocks, KEPT and the end kept; one for all tests of an architecture."""
    folder = tmp_path_factory.mktemp(request.param)
    return Bench(zoo.by_name(request.param), folder, tokens=TOKENS, step=STEP, keep=(KEPT,))


def restorable(bench: Bench) -> list[int]:
    """Positions of interest at which this model's layers were all kept."""
    kinds, window = bench.architecture.kinds, bench.architecture.window
    if "state" in kinds:
        return [KEPT, 512, TOKENS]
    first = [255, 256, 257] if window is None else [window, 100, 255, 256, 257, KEPT]
    return [*first, 512, 513, TOKENS - 1, TOKENS]


def test_cuts_at_and_inside_blocks_equal_the_uninterrupted_run(bench) -> None:
    for cut in restorable(bench):
        assert bench.deviation_at(cut) <= bench.limit_at(cut), f"cut at {cut}"


def test_positions_that_cannot_be_had_are_refused_with_the_nearest(bench) -> None:
    refusals = [(-1, TOKENS), (TOKENS + 1, TOKENS)]
    if "state" in bench.architecture.kinds:
        refusals += [(KEPT - 1, 0), (511, KEPT), (TOKENS - 1, 512)]
    for cut, nearest in refusals:
        with pytest.raises(CannotTrim) as refused:
            bench.match().load(bench.model, upto=cut)
        assert refused.value.nearest == nearest


@pytest.mark.parametrize("shared", [290, 550])
def test_a_branch_computes_only_what_it_does_not_share(bench, shared) -> None:
    other = [3 if token != 3 else 4 for token in bench.ids[shared:TOKENS]]
    ids = [*bench.ids[:shared], *other]
    match = bench.match(ids)
    deepest = {290: 0, 550: 512}[shared] if "state" in bench.architecture.kinds else shared
    assert match.tokens == deepest
    assert match.reason.end in (End.DIVERGED, End.STATE_TOO_SHALLOW)
    outcome, ends = bench.prefill(ids, STEP)
    assert outcome.reused_tokens == deepest
    before = [end for end in bench.ends if end < deepest]
    chunks = [*before, *([deepest] if deepest else []), *ends]
    whole = feed(bench.model, make_prompt_cache(bench.model), ids, 0, chunks)
    stored = bench.match(ids).load(bench.model)
    assert deviation(np.array(stored.logits), whole) <= ROUNDING
    again = bench.match(ids).load(bench.model, upto=512)
    rest = [end for end in chunks if end > 512]
    assert deviation(feed(bench.model, again, ids, 512, rest), whole) <= ROUNDING


@pytest.mark.parametrize("name", ["gemma3_text", "llama4"])
def test_window_records_far_from_kept_positions_are_kept_on_request_only(name, tmp_path) -> None:
    architecture = zoo.by_name(name)
    benches = {
        records: Bench(
            architecture, tmp_path / records, tokens=900, step=STEP, window_records=records
        )
        for records in ("kept", "all")
    }
    with pytest.raises(CannotTrim):
        benches["kept"].match().load(benches["kept"].model, upto=200)
    for cut in (200, 400, 512):
        assert benches["all"].deviation_at(cut) <= benches["all"].limit_at(cut)


@pytest.mark.parametrize("name", ["llama-64", "gemma3_text", "mamba2", "falcon_h1", "gemma3n"])
def test_half_precision_keeps_every_bit(name, tmp_path) -> None:
    architecture = zoo.by_name(name)
    model = architecture.build()
    model.set_dtype(mx.bfloat16)
    bench = Bench(
        architecture, tmp_path, tokens=KEPT, step=STEP, llm=as_loaded(architecture, model)
    )
    assert bench.match().space.dtype == ("none" if name == "mamba2" else "bfloat16")
    for cut in (256, KEPT):
        assert bench.deviation_at(cut) == 0.0


@pytest.mark.parametrize(
    ("name", "tokens", "reused"),
    # A recurrent state is checkpointed every 1024 tokens, the rest at every block.
    [("llama-64", 700, 512), ("gemma3_text-32", 700, 512), ("llama4", 700, 512),
     ("falcon_h1", 1200, 1024)],
)  # fmt: skip
def test_a_stopped_prefill_goes_on_from_its_last_block(name, tokens, reused, tmp_path) -> None:
    whole = Bench(zoo.by_name(name), tmp_path / "whole", tokens=tokens, step=STEP)
    store = Store.create(tmp_path / "stopped")
    prefiller = Prefiller(store, whole.llm, step=STEP)
    ids = np.array(whole.ids[:tokens], dtype=np.uint32)
    request = PrefillRequest(token_ids=ids, name="prompt", codec="raw")

    def stop(done: int, total: int) -> None:
        if done > reused + STEP:
            raise Stopped("enough", tokens=done)

    with pytest.raises(Stopped):
        prefiller.run(request, on_chunk=stop)
    assert list(store.manifests()) == []
    outcome = prefiller.run(request)
    assert outcome.reused_tokens == reused
    assert outcome.prefilled_tokens == tokens - reused
    caches = store.match(whole.llm.fingerprint, ids).load(whole.model)
    assert deviation(whole.go_on(caches, tokens), whole.expected) == 0.0
    assert list(store.path.rglob("*.ckpt.*")) == []


_CHILD = """
import json, sys
import mlx.core as mx
import numpy as np
import kvq
from kvq.model.loading import load
for folder, store, ids, start, ends, out in json.load(sys.stdin):
    llm = load(folder)
    match = kvq.Store(store).match(llm.fingerprint, ids[:start])
    caches = match.load(llm.model)
    assert match.exact and caches.tokens == start
    at_end = np.array(caches.logits)
    for end in ends:
        logits = llm.model(mx.array(ids[start:end])[None], cache=caches)[0, -1]
        start = end
    np.savez(out, at_end=at_end, after=np.array(logits))
"""


def test_another_process_goes_on_with_the_same_bits(tmp_path) -> None:
    benches = {}
    for name in LOADED:
        architecture = zoo.by_name(name)
        llm = load(str(zoo.save_folder(architecture, tmp_path / name / "model")))
        benches[name] = Bench(architecture, tmp_path / name, tokens=KEPT, step=STEP, llm=llm)
    work = [
        (
            str(bench.llm.folder),
            str(bench.store.path),
            bench.ids,
            bench.tokens,
            bench.after,
            str(tmp_path / f"{name}.npz"),
        )
        for name, bench in benches.items()
    ]
    subprocess.run([sys.executable, "-c", _CHILD], input=json.dumps(work).encode(), check=True)
    for name, bench in benches.items():
        found = np.load(tmp_path / f"{name}.npz")
        assert np.array_equal(found["at_end"], bench.at_end), name
        assert np.array_equal(found["after"], bench.expected), name
