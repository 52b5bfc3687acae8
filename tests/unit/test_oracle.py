"""On every architecture: prefill, store, load, go on, as if the run had never been interrupted."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
import support_table
import zoo
from mlx_lm.models.cache import load_prompt_cache
from oracle import ROUNDING, STEP, Bench, as_loaded, cuts, deviation, feed, short_bench

import kvq
from kvq.errors import CannotTrim, UnsupportedModel
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store


@pytest.fixture(scope="module", params=zoo.ARCHITECTURES, ids=str)
def bench(request, tmp_path_factory) -> Iterator[Bench]:
    """One for all tests of an architecture, which leave its store as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)  # no power cut here, and much faster
        yield short_bench(request.param, tmp_path_factory.mktemp("bench"))


def test_resuming_at_any_cut_equals_the_uninterrupted_run(bench) -> None:
    for cut in cuts(bench):
        assert bench.deviation_at(cut) <= bench.limit_at(cut), f"cut at {cut}"


def test_an_exact_hit_has_the_logits_already(bench) -> None:
    match = bench.match()
    assert match.exact
    assert match.tokens == bench.tokens
    assert deviation(np.array(match.load(bench.model).logits), bench.at_end) == 0.0


def test_another_end_matches_up_to_the_first_differing_token(bench) -> None:
    shared = STEP + 10
    other = [3 if token != 3 else 4 for token in bench.ids[shared : bench.tokens]]
    match = bench.match([*bench.ids[:shared], *other])
    assert match.tokens == (STEP + 7 if "state" in bench.architecture.kinds else shared)
    assert match.reason.message
    if bench.architecture.chunk_free:
        caches = match.load(bench.model)
        assert deviation(bench.go_on(caches, match.tokens), bench.expected) <= ROUNDING


def test_trimming_in_memory_is_exact_or_refused(bench) -> None:
    n = bench.tokens
    caches = bench.match().load(bench.model)
    if bench.architecture.kinds - {"kv"}:
        with pytest.raises(CannotTrim) as refused:
            kvq.trim(caches, 5)
        assert refused.value.nearest == n
        assert caches.tokens == n
        assert deviation(bench.go_on(caches, n), bench.expected) == bench.deviation_at(n)
        return
    assert kvq.trim(caches, 5) == n - 5
    assert caches.tokens == n - 5
    if bench.architecture.chunk_free:
        assert deviation(bench.go_on(caches, n - 5), bench.expected) <= ROUNDING


def test_what_was_fed_after_loading_can_be_trimmed_where_rows_allow(bench) -> None:
    n = bench.tokens
    caches = bench.match().load(bench.model)
    wrong = [3 if token != 3 else 4 for token in bench.ids[n : n + 6]]
    feed(bench.model, caches, [*bench.ids[:n], *wrong], n, [n + 6])
    caches.advance(6)
    if "state" in bench.architecture.kinds:
        with pytest.raises(CannotTrim):
            kvq.trim(caches, 6)
        return
    # A rotating window keeps the rows before the last chunk of several tokens, but one.
    spare = 5 if "window" in bench.architecture.kinds else 6
    if spare == 5:
        with pytest.raises(CannotTrim) as refused:
            kvq.trim(caches, 6)
        assert refused.value.nearest == n + 1
        return
    assert kvq.trim(caches, 6) == n
    assert deviation(bench.go_on(caches, n), bench.expected) <= ROUNDING


def test_a_stock_file_goes_on_like_the_cache_that_it_was_made_from(bench, tmp_path) -> None:
    n = bench.tokens
    file = tmp_path / "prompt.safetensors"
    kvq.write_prompt_cache(
        file, bench.match().load(bench.model), {"é": [1]}, token_ids=bench.ids[:n]
    )
    read = kvq.read_prompt_cache(file)
    assert read.metadata == {"é": [1]}
    assert read.token_ids.tolist() == bench.ids[:n]
    resumed = bench.deviation_at(n)
    assert deviation(bench.go_on(read.cache, n), bench.expected) == resumed
    assert deviation(bench.go_on(load_prompt_cache(str(file)), n), bench.expected) == resumed


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the table is measured on a CPU")
def test_the_support_table_says_what_is_measured(bench) -> None:
    assert support_table.row(bench) in support_table.written_rows()


def test_the_support_table_says_nothing_else() -> None:
    rows = support_table.written_rows()
    names = [one.split("`")[1] for one in rows]
    assert names == [architecture.name for architecture in zoo.ARCHITECTURES]
    assert support_table.FILE.read_text() == support_table.render(rows)


@pytest.mark.parametrize("architecture", zoo.FOREIGN, ids=str)
def test_an_unknown_cache_class_is_refused_by_name_before_any_prefill(
    architecture, tmp_path
) -> None:
    llm = as_loaded(architecture)
    calls = []
    prefiller = Prefiller(Store.create(tmp_path / "store"), llm)
    request = PrefillRequest(token_ids=np.arange(3, 20, dtype=np.uint32), name="x", codec="raw")
    with pytest.raises(UnsupportedModel, match="LayerCache"):
        prefiller.run(request, on_chunk=lambda *at: calls.append(at))
    assert calls == []
