"""Stored caches as stock files, stock files as stored caches: nothing lost, nothing made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import zoo
from fixtures.stock_scenarios import SUFFIX, resume, scenario
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from oracle import Bench, as_loaded, deviation, feed, short_bench

from kvq.errors import CacheError, CacheNotFound, CannotTrim, StoreError, UsageError
from kvq.exchange import ImportRequest, export_cache, import_cache
from kvq.exchange.empty import CachesOf
from kvq.model.folder import ModelFacts
from kvq.model.loading import LoadedModel
from kvq.prefill import Prefiller, PrefillRequest
from kvq.prefill.gate import REPLAY_TOKENS
from kvq.stock import read_prompt_cache, write_prompt_cache
from kvq.store import End, Store
from kvq.store.verify import Severity, verify

#: Every kind of cache: full, latents, shared keys, windows, chunks, states, nested lists.
NAMES = ("llama-64", "deepseek_v3", "gemma3_text", "gpt_oss", "gemma4_text", "llama4",
         "qwen3_next", "falcon_h1", "mamba2")  # fmt: skip
FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "stock").iterdir())


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.fixture(scope="module", params=NAMES)
def bench(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return short_bench(zoo.by_name(request.param), tmp_path_factory.mktemp("bench"))


# Export


def test_mlx_lm_goes_on_from_an_exported_file_as_if_uninterrupted(bench, tmp_path) -> None:
    written = export_cache(bench.store, "prompt", tmp_path / "out", model="some/model")

    assert written.path == tmp_path / "out.safetensors"
    assert (written.tokens, written.generation, written.codec) == (bench.tokens, "C", "raw")
    assert written.bytes == written.path.stat().st_size
    cache, metadata = load_prompt_cache(str(written.path), return_metadata=True)
    assert metadata["model"] == "some/model"
    assert metadata["tokenizer_config"] == "{}"
    assert deviation(bench.go_on(cache, bench.tokens), bench.expected) == 0.0


def test_an_exported_file_says_where_it_comes_from(bench, tmp_path) -> None:
    export_cache(bench.store, "prompt", tmp_path / "out")
    found = read_prompt_cache(tmp_path / "out.safetensors")
    assert found.token_ids is not None
    assert found.token_ids.tolist() == bench.ids[: bench.tokens]
    assert found.metadata["model"] == bench.llm.name
    origin = found.metadata["kvq_cache"]
    assert (origin["name"], origin["fingerprint"]) == ("prompt", bench.llm.fingerprint)


def test_caches_made_from_a_space_are_the_models(bench) -> None:
    (space,) = bench.store.spaces()
    ours, theirs = CachesOf(space).make_cache(), make_prompt_cache(bench.model)
    assert zoo.layout(ours) == zoo.layout(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("max_size", "keep", "chunk_size"):
            assert getattr(one, name, None) == getattr(other, name, None)


@pytest.fixture
def plain(tmp_path: Path) -> Bench:
    """A full-attention model's prompt, in a store that a test may damage."""
    return Bench(zoo.by_name("llama-64"), tmp_path, tokens=300, step=128)


def test_less_than_the_whole_can_be_exported(plain, tmp_path) -> None:
    written = export_cache(plain.store, "prompt", tmp_path / "out", upto=270)
    assert written.tokens == 270
    cache = load_prompt_cache(str(written.path))
    assert cache[0].offset == 270
    ends = [300, *plain.after]
    fresh = make_prompt_cache(plain.model)
    assert feed(plain.model, cache, plain.ids, 270, ends) == pytest.approx(
        feed(plain.model, fresh, plain.ids, 0, [270, *ends]), rel=1e-4, abs=1e-5
    )
    for upto in (0, 301):
        with pytest.raises(CannotTrim):
            export_cache(plain.store, "prompt", tmp_path / "none", upto=upto)
    assert not (tmp_path / "none.safetensors").exists()


def test_generation_a_is_written_where_it_can_hold_the_caches(bench, tmp_path) -> None:
    # It has no nested lists, and puts a chunked cache that has slid at a wrong position.
    if set("(C") & set(bench.architecture.caches):
        with pytest.raises(CacheError):
            export_cache(bench.store, "prompt", tmp_path / "out", generation="A")
        assert list(tmp_path.iterdir()) == []
        return
    export_cache(bench.store, "prompt", tmp_path / "out", generation="A")
    found = read_prompt_cache(tmp_path / "out.safetensors")
    assert found.generation == "A"
    assert deviation(bench.go_on(found.cache, bench.tokens), bench.expected) <= 1e-4


def test_a_name_that_is_not_stored_is_said(plain, tmp_path) -> None:
    with pytest.raises(CacheNotFound, match="no cache named 'other'"):
        export_cache(plain.store, "other", tmp_path / "out")


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_cache_that_is_no_longer_whole_is_not_exported(plain, tmp_path, how, which) -> None:
    target = plain.match().plan.kv[which].header.path
    if how == "gone":
        target.unlink()
    else:
        data = bytearray(target.read_bytes())
        data[-1] ^= 1
        target.write_bytes(data)
    with pytest.raises(StoreError, match=f"no longer whole: {256 * which} of its 300 tokens"):
        export_cache(plain.store, "prompt", tmp_path / "out")
    assert not (tmp_path / "out.safetensors").exists()


# Import


def stock_file(path: Path, model: Any, ids: list[int], **options: Any) -> Path:
    """What `mlx_lm.cache_prompt` writes for these ids."""
    cache = make_prompt_cache(model, options.pop("max_kv_size", None))
    for _ in generate_step(mx.array(ids), model, max_tokens=0, prompt_cache=cache, **options):
        pass
    mx.eval([one.state for one in cache])
    save_prompt_cache(str(path), cache, {"model": "some/model", "tokenizer_config": "{}"})
    return path


def stored(store: Store, llm: LoadedModel, ids: list[int], codec: str = "raw") -> None:
    """The same ids, prefilled by kvq."""
    request = PrefillRequest(token_ids=np.array(ids, np.uint32), name="prefilled", codec=codec)
    Prefiller(store, llm).run(request)


@pytest.fixture(scope="module", params=NAMES)
def llm(request: Any) -> LoadedModel:
    return as_loaded(zoo.by_name(request.param))


def ids_for(llm: LoadedModel, tokens: int) -> list[int]:
    return zoo.prompt(zoo.by_name(llm.name), tokens)


@pytest.mark.parametrize("tokens", [3, 300])
def test_what_mlx_lm_wrote_resumes_as_what_kvq_prefilled(llm, tokens, tmp_path) -> None:
    ids = ids_for(llm, tokens)
    file = stock_file(tmp_path / "stock.safetensors", llm.model, ids)
    imported, prefilled = Store.create(tmp_path / "one"), Store.create(tmp_path / "two")
    request = ImportRequest(name="it", codec="raw", metadata={"a": 1})
    done = import_cache(imported, llm, file, request, token_ids=ids)
    stored(prefilled, llm, ids)

    assert (done.tokens, done.codec, done.generation) == (tokens, "raw", "C")
    manifest = imported.manifest("it")
    assert (manifest.tokens, dict(manifest.metadata)) == (tokens, {"a": 1})
    assert manifest.lossy_prefix_tokens == 0
    longer = [*ids, *ids_for(llm, tokens + 8)[tokens:]]
    matches = [one.match(llm.fingerprint, longer) for one in (imported, prefilled)]
    assert [one.tokens for one in matches] == [tokens, tokens]
    # The last token was fed alone, so even the order of a window's rows is the same.
    ends = [tokens + more for more in (1, 2, 8)]
    whole = feed(llm.model, make_prompt_cache(llm.model), longer, 0, [tokens - 1, tokens, *ends])
    resumed = feed(llm.model, matches[0].load(llm.model), longer, tokens, ends)
    assert deviation(resumed, whole) == 0.0
    if "state" not in zoo.by_name(llm.name).kinds:
        exact = imported.match(llm.fingerprint, ids)
        assert exact.exact
        ours, theirs = (
            np.array(one.match(llm.fingerprint, ids).load(llm.model).logits)
            for one in (imported, prefilled)
        )
        assert deviation(ours, theirs) <= 1e-5
        assert done.bytes == matches[0].nbytes


def test_the_notes_say_where_it_can_be_resumed(llm, tmp_path) -> None:
    ids = ids_for(llm, 300)
    file = stock_file(tmp_path / "stock.safetensors", llm.model, ids)
    store = Store.create(tmp_path / "store")
    done = import_cache(store, llm, file, ImportRequest(name="it", codec="raw"), token_ids=ids)
    kinds = zoo.by_name(llm.name).kinds
    before = store.match(llm.fingerprint, [*ids[:290], 1, 2, 3])
    said = " ".join(done.notes)
    if "state" in kinds:
        assert "after all of its 300 tokens, not before" in said
        assert "not a repetition of its own" in said
        assert before.tokens == 0
        assert before.reason.end is End.STATE_TOO_SHALLOW
    elif kinds & {"window", "chunked"}:
        assert "after all of its 300 tokens, not before" in said or "from" in said
        assert before.tokens == 0
        assert before.reason.end is End.WINDOW_NOT_KEPT
    else:
        assert done.notes == ("imported from a prompt-cache file of generation C",)
        assert before.tokens == 290
    assert store.manifest("it").notes == done.notes
    report = verify(store)
    assert report.ok
    # Without the logits, verify says once more what the notes say.
    assert [one.severity for one in report.findings] == (
        [Severity.WARNING] if "state" in kinds else []
    )


def test_blocks_that_a_sweep_takes_meanwhile_are_written_again(small, monkeypatch) -> None:
    store, llm, ids, file = small
    held = Store.publish_held
    swept = []

    def sweep(self: Store, manifest: Any) -> bool:
        if not swept:
            swept.extend(store.path.rglob("*.safetensors"))
            for path in swept:
                path.unlink()
        return held(self, manifest)

    monkeypatch.setattr(Store, "publish_held", sweep)
    import_cache(store, llm, file, RAW, token_ids=ids)
    assert swept
    assert store.match(llm.fingerprint, ids).exact


@pytest.mark.parametrize("file", FIXTURES, ids=lambda path: path.stem)
def test_files_of_every_generation_are_imported(file: Path, tmp_path: Path) -> None:
    case = scenario(file.stem.partition("-")[2])
    model = case.build()
    facts = ModelFacts(model_type=case.module, context_tokens=None, vocab_size=None)
    llm = LoadedModel(name=case.name, folder=Path(), fingerprint=case.name, facts=facts,
                      nbytes=0, model=model, tokenizer=None)  # fmt: skip
    store = Store.create(tmp_path)
    ids = list(case.token_ids)
    request = ImportRequest(name="it", codec="q8" if case.name == "quantized" else "raw")
    if case.name == "window-rotated":
        with pytest.raises(UsageError, match="layer 0 has dropped tokens, which this model keeps"):
            import_cache(store, llm, file, request, token_ids=ids)
        assert store.names() == []
        return
    done = import_cache(store, llm, file, request, token_ids=ids)
    match = store.match(case.name, [*ids, *SUFFIX])
    assert match.tokens == done.tokens == len(ids)
    live = case.make(model)
    case.prefill(model, live)
    tokens, logits = resume(model, live)
    again, others = resume(model, match.load(model))
    if case.name != "quantized":
        assert again == tokens
        assert np.abs(np.array(others) - np.array(logits)).max() < 2e-5


def test_rows_are_stored_in_pieces_as_in_one(tmp_path, monkeypatch) -> None:
    llm = as_loaded(zoo.by_name("gemma3_text"))
    ids = ids_for(llm, 700)
    file = stock_file(tmp_path / "stock.safetensors", llm.model, ids)
    request = ImportRequest(name="it", codec="raw")
    one = Store.create(tmp_path / "one")
    import_cache(one, llm, file, request, token_ids=ids)
    monkeypatch.setattr("kvq.exchange.record.STEP", 90)
    pieces = Store.create(tmp_path / "pieces")
    import_cache(pieces, llm, file, request, token_ids=ids)
    digests = [
        {
            path.relative_to(store.path): path.read_bytes()
            for path in store.path.rglob("*.safetensors")
        }
        for store in (one, pieces)
    ]
    assert digests[0] == digests[1]


def test_an_exported_file_comes_back_by_its_own_ids(bench, tmp_path) -> None:
    export_cache(bench.store, "prompt", tmp_path / "out")
    store = Store.create(tmp_path / "store")
    request = ImportRequest(name="back", codec="raw")
    done = import_cache(store, bench.llm, tmp_path / "out.safetensors", request)
    assert done.tokens == bench.tokens
    match = store.match(bench.llm.fingerprint, bench.ids)
    assert match.tokens == bench.tokens
    assert deviation(bench.go_on(match.load(bench.model), bench.tokens), bench.expected) <= 1e-6


# What is refused


@pytest.fixture
def small(tmp_path: Path) -> tuple[Store, LoadedModel, list[int], Path]:
    llm = as_loaded(zoo.by_name("llama-64"))
    ids = ids_for(llm, 300)
    file = stock_file(tmp_path / "stock.safetensors", llm.model, ids)
    return Store.create(tmp_path / "store"), llm, ids, file


RAW = ImportRequest(name="it", codec="raw")


def test_a_file_without_ids_needs_them(small) -> None:
    store, llm, _, file = small
    with pytest.raises(UsageError, match="does not say which tokens"):
        import_cache(store, llm, file, RAW)


@pytest.mark.parametrize("where", [0, 63, 299])
def test_other_tokens_are_refused(small, where) -> None:
    store, llm, ids, file = small
    other = list(ids)
    other[where] = 7 if ids[where] != 7 else 8
    which = "last" if where == 299 else "first"
    with pytest.raises(UsageError, match=f"of the {which} tokens are .* away"):
        import_cache(store, llm, file, RAW, token_ids=other)
    assert not (store.path / "spaces").exists()
    assert store.names() == []


def test_another_count_of_tokens_is_refused(small) -> None:
    store, llm, ids, file = small
    for other in (ids[:-1], [*ids, 5]):
        with pytest.raises(UsageError, match=f"cover 300 tokens, not the {len(other)} given"):
            import_cache(store, llm, file, RAW, token_ids=other)
    with pytest.raises(UsageError, match="no tokens"):
        import_cache(store, llm, file, RAW, token_ids=[])
    with pytest.raises(UsageError, match="token ids"):
        import_cache(store, llm, file, RAW, token_ids=[-1] * 300)


def test_ids_that_contradict_the_files_own_are_refused(small, tmp_path) -> None:
    store, llm, ids, file = small
    cache = load_prompt_cache(str(file))
    write_prompt_cache(tmp_path / "with", cache, token_ids=ids)
    with pytest.raises(UsageError, match="they are not those given"):
        import_cache(store, llm, tmp_path / "with.safetensors", RAW, token_ids=ids[::-1])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("llama-96", r"layer 0 has keys \(heads, dim\) \(\d, 64\), the model's \(\d, 96\)"),
        ("gemma3_text", "it has 2 caches, the model"),
        ("mamba2", "layer 0 has the class KVCache, the model's ArraysCache"),
    ],
)
def test_the_caches_of_another_model_are_refused(small, other, said) -> None:
    store, _, ids, file = small
    with pytest.raises(UsageError, match=said):
        import_cache(store, as_loaded(zoo.by_name(other)), file, RAW, token_ids=ids)
    assert store.names() == []


def test_another_model_of_the_same_shape_is_noticed(small) -> None:
    store, _, ids, file = small
    other = as_loaded(zoo.by_name("llama-64"))
    for layer in other.model.layers:
        layer.self_attn.k_proj.weight = layer.self_attn.k_proj.weight[::-1]
    with pytest.raises(UsageError, match="not the caches of these tokens and this model"):
        import_cache(store, other, file, RAW, token_ids=ids)


def test_a_file_exported_for_another_fingerprint_is_refused(plain, tmp_path) -> None:
    export_cache(plain.store, "prompt", tmp_path / "out")
    other = as_loaded(zoo.by_name("llama-96"))
    with pytest.raises(UsageError, match="exported for another model"):
        import_cache(plain.store, other, tmp_path / "out.safetensors", RAW)


def test_another_dtype_is_refused(small, tmp_path) -> None:
    store, llm, ids, _ = small
    half = as_loaded(zoo.by_name("llama-64"))
    half.model.set_dtype(mx.bfloat16)
    file = stock_file(tmp_path / "half.safetensors", half.model, ids)
    with pytest.raises(UsageError, match="keys of bfloat16, the model's float32"):
        import_cache(store, llm, file, RAW, token_ids=ids)


def test_several_sequences_are_refused(small, tmp_path) -> None:
    store, llm, ids, _ = small
    cache = make_prompt_cache(llm.model)
    llm.model(mx.array([ids, ids]), cache=cache)
    write_prompt_cache(tmp_path / "two", cache)
    with pytest.raises(UsageError, match="layer 0 holds several sequences"):
        import_cache(store, llm, tmp_path / "two.safetensors", RAW, token_ids=ids)


@pytest.mark.parametrize(("size", "said"), [(512, None), (64, "at most 64 tokens")])
def test_a_limited_cache_serves_while_it_has_dropped_nothing(small, tmp_path, size, said) -> None:
    store = small[0]
    llm = as_loaded(zoo.by_name("exaone"))  # models that make their own caches ignore the limit
    ids = ids_for(llm, 300)
    file = stock_file(tmp_path / "limited.safetensors", llm.model, ids, max_kv_size=size)
    if said:
        with pytest.raises(UsageError, match=said):
            import_cache(store, llm, file, RAW, token_ids=ids)
        return
    import_cache(store, llm, file, RAW, token_ids=ids)
    assert store.match(llm.fingerprint, ids).exact


# Lossy


def test_a_lossy_codec_is_measured_as_in_a_prefill(small) -> None:
    store, llm, ids, file = small
    done = import_cache(store, llm, file, ImportRequest(name="it", codec="q8"), token_ids=ids)
    stored(store, llm, ids, codec="q8")
    ours, theirs = done.quality, store.manifest("prefilled").quality
    assert ours is not None
    assert theirs is not None
    assert ours["codec"] == "q8"
    assert ours["tokens"] == theirs["tokens"] == REPLAY_TOKENS
    assert ours["mean_kl"] == pytest.approx(theirs["mean_kl"], rel=0.2, abs=1e-6)
    assert store.manifest("it").quality == ours


def test_a_wrapped_window_is_measured_on_its_last_token(tmp_path) -> None:
    llm = as_loaded(zoo.by_name("gemma3_text"))
    ids = ids_for(llm, 300)
    file = stock_file(tmp_path / "stock.safetensors", llm.model, ids)
    store = Store.create(tmp_path / "store")
    done = import_cache(store, llm, file, ImportRequest(name="it", codec="q4"), token_ids=ids)
    assert done.quality is not None
    assert done.quality["tokens"] == 1


@pytest.mark.parametrize(
    ("bits", "codec", "advice"),
    [(8, "raw", "use --codec q8"), (4, "q8", "use --codec q4"), (4, "raw", "use --codec q4"),
     (2, "q4", "no codec holds so little"), (8, "q8", None), (8, "q4", None), (4, "q4", None)],
)  # fmt: skip
def test_quantized_values_are_not_passed_off_as_better(
    small, tmp_path, bits, codec, advice
) -> None:
    store, llm, ids, _ = small
    file = stock_file(tmp_path / "quantized.safetensors", llm.model, ids, kv_bits=bits,
                      kv_group_size=32, quantized_kv_start=0)  # fmt: skip
    request = ImportRequest(name="it", codec=codec)
    if advice:
        with pytest.raises(UsageError, match=f"{bits} bits, .*{advice}"):
            import_cache(store, llm, file, request, token_ids=ids)
        return
    done = import_cache(store, llm, file, request, token_ids=ids)
    assert store.manifest("it").lossy_prefix_tokens == 300
    assert f"went through {bits} bits" in done.notes[0]
    assert store.match(llm.fingerprint, ids).exact


def test_a_lossy_cache_that_went_out_does_not_come_back_as_raw(small, tmp_path) -> None:
    store, llm, ids, _ = small
    stored(store, llm, ids, codec="q4")
    written = export_cache(store, "prefilled", tmp_path / "out")
    assert written.codec == "q4"
    for codec in ("raw", "q8"):
        with pytest.raises(UsageError, match="went through 4 bits"):
            import_cache(store, llm, written.path, ImportRequest(name="it", codec=codec))
    import_cache(store, llm, written.path, ImportRequest(name="it", codec="q4"))
