"""TokenIterator: the tokens of mlx-lm, from any cache, and a cache that says what it covers."""

from __future__ import annotations

import copy

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402
from zoo import ARCHITECTURES  # noqa: E402

from kvq.cache.container import KVCacheContainer  # noqa: E402
from kvq.errors import Stopped, UsageError  # noqa: E402
from kvq.generate.iterator import TokenIterator  # noqa: E402
from kvq.generate.parameters import GenerateParameters  # noqa: E402

BY_NAME = {arch.name: arch for arch in ARCHITECTURES}
PROMPT = [(7 * i * i + 3 * i + 5) % 128 for i in range(21)]
CHUNKED = {"max_tokens": 6, "prefill_step_size": 8}


@pytest.fixture(scope="module")
def llama():
    return BY_NAME["llama-64"].build()


class Counting:
    """A model that counts the tokens of each forward pass."""

    def __init__(self, model):
        self.model = model
        self.calls = []
        self.layers = model.layers

    def __call__(self, ids, cache=None):
        self.calls.append(ids.shape[1])
        return self.model(ids, cache=cache)


def theirs(model, **options):
    cache = options.pop("prompt_cache", None) or make_prompt_cache(model)
    steps = generate_step(mx.array(PROMPT), model, prompt_cache=cache, **options)
    return list(steps), cache


def ours(prompt, model, cache=None, **options):
    named = {key: options.pop(key) for key in ("prior_ids", "first_logits") if key in options}
    iterator = TokenIterator(prompt, model, cache, GenerateParameters(**options), **named)
    return [(token, iterator.logprobs) for token in iterator], iterator


def same(a, b):
    return [t for t, _ in a] == [t for t, _ in b] and all(
        mx.array_equal(x, y).item() for (_, x), (_, y) in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=str)
def test_greedy_tokens_are_those_of_mlx_lm_bit_for_bit(arch):
    model = arch.build()
    expected, their_cache = theirs(model, **CHUNKED)
    got, iterator = ours(PROMPT, model, **CHUNKED)
    assert same(got, expected)
    leaves = [cache for cache in iterator.cache if hasattr(cache, "offset")]
    assert [cache.offset for cache in leaves] == [
        cache.offset for cache in their_cache if hasattr(cache, "offset")
    ]


def test_sampled_tokens_are_those_of_mlx_lm(llama):
    mx.random.seed(3)
    expected, _ = theirs(llama, **CHUNKED, sampler=make_sampler(temp=0.9, top_k=40))
    mx.random.seed(3)
    got, _ = ours(PROMPT, llama, **CHUNKED, temperature=0.9, top_k=40)
    assert same(got, expected)


def test_a_sampler_of_the_caller_is_used(llama):
    got, _ = ours(PROMPT, llama, max_tokens=3, sampler=lambda logprobs: mx.array([17]))
    assert [token for token, _ in got] == [17, 17, 17]


def test_live_quantization_gives_the_tokens_of_mlx_lm_where_that_runs(llama):
    expected, _ = theirs(llama, **CHUNKED, kv_bits=8, quantized_kv_start=0)
    got, iterator = ours(PROMPT, llama, **CHUNKED, kv_bits=8)
    assert same(got, expected)
    assert [row.state for row in iterator.cache.report] == ["active", "active"]


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "deepseek_v3", "gemma2", "llama4"])
def test_live_quantization_never_stops_a_generation(name):
    model = BY_NAME[name].build()
    got, _ = ours(PROMPT, model, **CHUNKED, kv_bits=4, quantized_kv_start=10)
    assert len(got) == 6


def test_layers_are_exchanged_in_a_plain_list_too(llama):
    cache = make_prompt_cache(llama)
    held = cache
    ours(PROMPT, llama, cache, **CHUNKED, kv_bits=8, quantized_kv_start=23)
    assert [type(layer).__name__ for layer in held] == ["QuantizedKVCache"] * 2


@pytest.mark.parametrize("name", ["llama-64", "gemma3_text", "qwen3_next", "falcon_h1", "llama4"])
@pytest.mark.parametrize("taken", [1, 3])
def test_the_cache_covers_what_was_yielded_and_goes_on_from_there(name, taken):
    model = BY_NAME[name].build()
    whole, _ = ours(PROMPT, model, **CHUNKED)
    container = KVCacheContainer.make(model)
    iterator = TokenIterator(PROMPT, model, container, GenerateParameters(**CHUNKED))
    tokens = [next(iterator) for _ in range(taken)]
    assert container.tokens == len(PROMPT) + taken
    assert iterator.token_count == taken

    # All of `tokens` are in the cache: the same question can only be put by trimming or going on.
    later, _ = ours([99, 98], model, container, max_tokens=4)
    again = KVCacheContainer.make(model)
    for ids in (PROMPT[:8], PROMPT[8:16], PROMPT[16:20], PROMPT[20:], *([t] for t in tokens)):
        mx.eval(model(mx.array([ids]), cache=again))
    expected, _ = ours([99, 98], model, again, max_tokens=4)
    assert [t for t, _ in whole][:taken] == tokens
    assert same(later, expected)


def test_the_first_token_does_not_wait_for_the_second(llama, monkeypatch):
    started = []
    start = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (started.append(1), start(*arrays)))
    iterator = TokenIterator(PROMPT, llama)
    counts = [len(started)]
    for _ in range(3):
        next(iterator)
        counts.append(len(started))
    assert counts == [1, 1, 3, 4]


def test_an_exact_hit_needs_no_forward_pass_for_its_first_token(llama):
    expected, _ = ours(PROMPT, llama, max_tokens=3)
    cache = make_prompt_cache(llama)
    mx.eval(llama(mx.array([PROMPT[:-1]]), cache=cache))
    logits = llama(mx.array([PROMPT[-1:]]), cache=cache)[0, -1]
    mx.eval(logits)

    counting = Counting(llama)
    container = KVCacheContainer(cache, tokens=len(PROMPT), logits=logits)
    iterator = TokenIterator([], counting, container, GenerateParameters(max_tokens=3))
    assert counting.calls == []
    assert same([(token, iterator.logprobs) for token in iterator], expected)
    assert counting.calls == [1, 1, 1]
    assert container.tokens == len(PROMPT) + 3
    assert container.logits is None


def test_stored_logits_can_be_passed_and_are_not_needed_otherwise(llama):
    cache = make_prompt_cache(llama)
    logits = llama(mx.array([PROMPT]), cache=cache)[:, -1]
    got, _ = ours([], llama, copy.deepcopy(cache), max_tokens=1, first_logits=logits)
    assert [token for token, _ in got] == [mx.argmax(logits).item()]
    with pytest.raises(UsageError, match="logits after the last cached token"):
        ours([], llama, cache)


def test_logits_processors_see_the_prompt_and_what_was_sampled(llama):
    seen = []

    def watch(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    prior, rest = PROMPT[:9], PROMPT[9:]
    cache = make_prompt_cache(llama)
    mx.eval(llama(mx.array([prior]), cache=cache))
    got, _ = ours(rest, llama, cache, prior_ids=prior, logits_processors=(watch,), max_tokens=2)
    tokens = [token for token, _ in got]
    assert seen == [PROMPT, PROMPT + tokens[:1], PROMPT + tokens]


def test_a_repetition_penalty_is_that_of_mlx_lm(llama):
    from mlx_lm.sample_utils import make_logits_processors

    penalty = make_logits_processors(repetition_penalty=1.7, repetition_context_size=12)
    expected, _ = theirs(llama, **CHUNKED, logits_processors=penalty)
    got, _ = ours(PROMPT, llama, **CHUNKED, repetition_penalty=1.7, repetition_context_size=12)
    assert same(got, expected)
    assert not same(got, ours(PROMPT, llama, **CHUNKED)[0])


def test_the_prompt_is_fed_in_chunks_and_its_last_token_alone(llama):
    counting, seen = Counting(llama), []
    iterator = TokenIterator(
        PROMPT,
        counting,
        make_prompt_cache(llama),
        GenerateParameters(max_tokens=0, prefill_step_size=8),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert list(iterator) == []
    assert counting.calls == [8, 8, 4, 1]
    assert seen == [(0, 21), (8, 21), (16, 21), (20, 21), (21, 21)]
    assert iterator.prompt_prefill_seconds > 0


def test_progress_can_stop_a_prefill_between_chunks(llama):
    def stop(done, total):
        if done == 16:
            raise Stopped("cancelled", done)

    container = KVCacheContainer.make(llama)
    with pytest.raises(Stopped):
        TokenIterator(
            PROMPT, llama, container, GenerateParameters(prefill_step_size=8), progress=stop
        )
    assert container.tokens == 16
    assert [cache.offset for cache in container] == [16, 16]


@pytest.mark.parametrize("form", [list, tuple, np.array, mx.array])
def test_ids_may_come_in_any_form(llama, form):
    expected, _ = ours(PROMPT, llama, max_tokens=2)
    got, _ = ours(form(PROMPT), llama, max_tokens=2)
    assert same(got, expected)


def test_without_a_limit_tokens_keep_coming(llama):
    iterator = TokenIterator(PROMPT, llama, parameters=GenerateParameters(max_tokens=None))
    assert len([next(iterator) for _ in range(300)]) == 300
    assert iterator.token_count == 300


def test_max_kv_size_bounds_the_caches_that_the_iterator_makes():
    model = BY_NAME["qwen3"].build()
    _, iterator = ours(PROMPT, model, max_kv_size=8, max_tokens=1)
    assert {type(cache).__name__ for cache in iterator.cache} == {"RotatingKVCache"}


@pytest.mark.parametrize(
    "options", [{"max_tokens": -1}, {"prefill_step_size": 0}, {"temperature": -0.1}]
)
def test_parameters_that_make_no_sense_are_refused(options):
    with pytest.raises(UsageError):
        GenerateParameters(**options)
