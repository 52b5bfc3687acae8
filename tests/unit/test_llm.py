"""Streams: the same text with and without the store, and honest figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinymodel import tiny_model

import kvq
from kvq.errors import UsageError
from kvq.generate.llm import LLM
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import End, Store

TEXT = "The harbour master writes: wind north-west, force five. " * 12


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("llm")
    store = Store.create(folder / "store")
    llm = kvq.open(str(tiny_model(folder / "model")), store=store)
    request = PrefillRequest(token_ids=llm.encode(TEXT), name="text", codec="raw")
    Prefiller(store, llm.loaded).run(request)
    return llm


def text(llm: LLM, *args: object, **options: object) -> str:
    return "".join(chunk.text for chunk in llm.stream(*args, max_tokens=12, **options))


def test_an_exact_hit_says_the_same_without_a_forward_pass(llm: LLM) -> None:
    cold = text(llm, TEXT, reuse=False)
    assert llm.last is not None
    assert llm.last.reused_tokens == 0
    assert text(llm, TEXT) == cold
    assert llm.last.reused_tokens == llm.last.prompt_tokens == len(llm.encode(TEXT))
    assert llm.last.reason is not None
    assert llm.last.reason.end is End.COMPLETE
    assert (llm.last.tokens, llm.last.finish_reason, llm.last.codec) == (12, "length", "raw")


@pytest.mark.parametrize("cut", [1, 2, 255, 256, 257, 300])
def test_a_prompt_that_goes_on_elsewhere_reuses_what_is_the_same(llm: LLM, cut: int) -> None:
    ids = [*llm.encode(TEXT)[:cut].tolist(), 7, 8, 9]
    cold = text(llm, ids, reuse=False)
    assert text(llm, ids) == cold
    assert llm.last is not None
    assert llm.last.reused_tokens == cut
    assert llm.last.reason is not None
    assert (llm.last.reason.end, llm.last.reason.position) == (End.DIVERGED, cut)


def test_a_prompt_that_ends_inside_what_is_stored_feeds_its_last_token(llm: LLM) -> None:
    ids = llm.encode(TEXT)[:100]
    cold = text(llm, ids, reuse=False)
    assert text(llm, ids) == cold
    assert llm.last is not None
    assert llm.last.reused_tokens == 99


def test_a_chat_is_rendered_for_an_answer(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert text(llm, messages=messages) == text(llm, llm.encode(messages=messages))


def test_what_cannot_be_a_prompt_is_refused(llm: LLM) -> None:
    for wrong in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}):
        with pytest.raises(UsageError, match="either a prompt or messages"):
            llm.stream(**wrong)
    with pytest.raises(UsageError, match="empty"):
        llm.stream([])


def test_without_a_store_everything_is_computed(llm: LLM) -> None:
    alone = LLM(llm.loaded)
    assert text(alone, TEXT) == text(llm, TEXT, reuse=False)
    assert alone.last is not None
    assert alone.last.reason is None


def test_codecs_limit_what_is_looked_at(llm: LLM, tmp_path: Path) -> None:
    text(llm, TEXT, codecs=["q8"])
    assert llm.last is not None
    assert llm.last.reused_tokens == 0
    assert llm.last.reason is not None
    assert llm.last.reason.message == "this model is stored with codec raw only, not with ['q8']"
