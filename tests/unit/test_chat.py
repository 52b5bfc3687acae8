from __future__ import annotations

import sys
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinytext
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import MissingExtra, ModelNotFound, TemplateError, UsageError
from kvq.model import boundary
from kvq.model.chat import (
    Chat,
    dated_kwargs,
    encode_chat_prefix,
    encode_chat_prefixes,
    encode_messages,
    encode_text,
    encode_texts,
    load_tokenizer,
    stable_chat_boundary,
)
from kvq.model.messages import check_messages, check_tools
from kvq.store.keys import common_prefix

CHATML = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Answers before the last question lose their thinking block, as in the Qwen family.
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- set answer = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- if '</think>' not in m.content %}{% set thought = '' %}{% endif %}
{%- if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- answer }}
{%- else %}{{ m.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if not enable_thinking | default(true) %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

# Trims, puts the system's text into the first question, and insists on turns, as Gemma's does.
TRIMMING = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content | trim + '\n\n' %}
{%- set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{{- '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- first if loop.first else '' }}{{ m.content | trim }}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"""

# No special token anywhere.
PLAIN = """
{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

BRACKETS = """
{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' and loop.index0 % 2 %}{{ ' ' + m.content + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""

CALLS = CHATML.replace("m.content", "m.content + (m.tool_calls | default('', true) | tojson)")

TOOLS = (
    """
{%- if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"""
    + CALLS
)

DATED = (
    """
{%- if strftime_now is defined %}{% set day = strftime_now("%d %b %Y") %}{% else %}
{%- set day = 'unknown' %}{% endif %}
{{- '<|im_start|>system\nToday is ' + day + ' (' + strftime_now('%H:%M') + ')<|im_end|>\n' }}"""
    + CHATML
)

TEMPLATES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "trimming": TRIMMING,
    "plain": PLAIN,
    "brackets": BRACKETS,
    "tools": TOOLS,
    "dated": DATED,
}
TOKENIZERS = {"bytes": tinytext.byte_level, "pieces": tinytext.sentencepiece}

SYSTEM = {"role": "system", "content": "You are a helpful assistant.\n"}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "<think>\nFrance, Paris.\n</think>\n\nParis."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "system": [SYSTEM],
    "question": [QUESTION],
    "system and question": [SYSTEM, QUESTION],
    "answered": [QUESTION, ANSWER],
    "second question": [QUESTION, ANSWER, {"role": "user", "content": " And of Spain?\n"}],
    "tool called": [
        QUESTION,
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
    ],
    "tool answered": [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "0", "tool_call_id": "1"},
    ],
}
NOON = datetime(2026, 7, 31, 12, 0)


def begins(prefix: np.ndarray, whole: np.ndarray) -> bool:
    return len(prefix) <= len(whole) and bool((whole[: len(prefix)] == prefix).all())


def text_of(tokenizer: Any, ids: np.ndarray) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids.tolist())).replace("Ġ", " ").replace(
        "Ċ", "\n"
    ).replace("▁", " ")  # fmt: skip


class TestText:
    def test_ids_are_those_of_the_tokenizer(self) -> None:
        for make in TOKENIZERS.values():
            tokenizer = make()
            ids = encode_text(tokenizer, "Hello world,\n\n hello")
            assert ids.dtype == np.uint32
            assert ids.tolist() == tokenizer.encode("Hello world,\n\n hello")

    def test_the_first_token_is_never_doubled(self) -> None:
        tokenizer = tinytext.sentencepiece()
        bos = tokenizer.bos_token_id
        assert encode_text(tokenizer, "Hello").tolist().count(bos) == 1
        assert encode_text(tokenizer, "<bos>Hello").tolist().count(bos) == 1
        assert encode_text(tokenizer, "<bos>Hello")[0] == bos
        assert encode_text(tokenizer, "").tolist() == [bos]
        assert encode_text(tinytext.byte_level(), "Hello").tolist().count(0) == 0

    def test_many_texts_keep_their_order(self) -> None:
        tokenizer = tinytext.sentencepiece()
        texts = ["Hello", "<bos>world", "", "fox <bos>", "<bos>", "dog"]
        found = [ids.tolist() for ids in encode_texts(tokenizer, texts)]
        assert found == [encode_text(tokenizer, text).tolist() for text in texts]
        assert encode_texts(tokenizer, []) == []

    def test_a_tokenizers_own_limits_do_not_cut_a_prompt(self) -> None:
        tokenizer = tinytext.byte_level()
        whole = encode_text(tokenizer, "Hello world " * 50)
        tokenizer.backend_tokenizer.enable_truncation(max_length=8)
        tokenizer.backend_tokenizer.enable_padding(length=4000)
        assert encode_text(tokenizer, "Hello world " * 50).tolist() == whole.tolist()

    def test_half_a_surrogate_pair_is_named(self) -> None:
        with pytest.raises(UsageError, match=r"half a surrogate pair \(\\ud83d\) at character 3"):
            encode_text(tinytext.byte_level(), "ab\ud83d")

    def test_slow_tokenizers_give_the_same(self) -> None:
        fast = tinytext.sentencepiece(CHATML)

        class Slow:
            is_fast = False

            def __getattr__(self, name: str) -> Any:
                return getattr(fast, name)

        assert encode_text(Slow(), "Hello").tolist() == encode_text(fast, "Hello").tolist()
        assert (
            encode_chat_prefix(Slow(), [SYSTEM, QUESTION]).tolist()
            == encode_chat_prefix(fast, [SYSTEM, QUESTION]).tolist()
        )

    def test_mlx_lms_wrapper_is_looked_through(self) -> None:
        inner = tinytext.sentencepiece(THINKING)

        class TokenizerWrapper:
            _tokenizer = inner

            def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
                raise AssertionError("it would set enable_thinking")

        wrapper = TokenizerWrapper()
        assert encode_text(wrapper, "Hello").tolist() == encode_text(inner, "Hello").tolist()
        assert (
            encode_messages(wrapper, [QUESTION]).tolist()
            == encode_messages(inner, [QUESTION]).tolist()
        )

    def test_ids_are_those_of_mlx_lm(self, tmp_path: Path) -> None:
        utils = pytest.importorskip("mlx_lm.tokenizer_utils")
        wrapper = utils.load(tinytext.save_model(tmp_path, tinytext.sentencepiece(THINKING)))
        inner = load_tokenizer(tmp_path)
        assert type(wrapper) is not type(inner)
        for text in ("Hello world", "<bos>Hello world", ""):
            # How mlx_lm.stream_generate encodes a prompt that is a string.
            special = wrapper.bos_token is None or not text.startswith(wrapper.bos_token)
            expected = wrapper.encode(text, add_special_tokens=special)
            assert encode_text(wrapper, text).tolist() == expected
            assert encode_text(inner, text).tolist() == expected
        assert (
            encode_messages(wrapper, [QUESTION]).tolist()
            == encode_messages(inner, [QUESTION]).tolist()
        )


class TestLoading:
    def test_a_saved_tokenizer_comes_back(self, tmp_path: Path) -> None:
        original = tinytext.sentencepiece(CHATML)
        loaded = load_tokenizer(tinytext.save_model(tmp_path, original))
        assert encode_text(loaded, "Hello").tolist() == encode_text(original, "Hello").tolist()
        assert (
            encode_messages(loaded, [QUESTION]).tolist()
            == encode_messages(original, [QUESTION]).tolist()
        )

    def test_a_model_type_that_transformers_does_not_know_is_no_matter(
        self, tmp_path: Path
    ) -> None:
        tinytext.save_model(tmp_path, tinytext.byte_level(), model_type="brand_new_7")
        assert len(encode_text(load_tokenizer(tmp_path), "Hello")) > 0

    def test_what_is_missing_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(ModelNotFound, match="has no tokenizer"):
            load_tokenizer(tmp_path)
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingExtra, match=r"pip install 'kvq\[producer\]'"):
            load_tokenizer(tmp_path)


class TestRendering:
    def test_the_rendered_text_is_tokenized_once(self) -> None:
        tokenizer = tinytext.sentencepiece(TRIMMING)
        ids = encode_messages(tokenizer, [QUESTION])
        rendered = tokenizer.apply_chat_template(
            [QUESTION], tokenize=False, add_generation_prompt=True
        )
        assert ids.tolist() == tokenizer.encode(rendered, add_special_tokens=False)
        assert ids.tolist().count(tokenizer.bos_token_id) == 1

    def test_thinking_is_left_to_the_caller(self) -> None:
        tokenizer = tinytext.byte_level(THINKING)
        silent = encode_messages(tokenizer, [QUESTION])
        off = encode_messages(
            tokenizer, [QUESTION], chat_template_kwargs={"enable_thinking": False}
        )
        assert text_of(tokenizer, silent).endswith("<|im_start|>assistant\n")
        assert text_of(tokenizer, off).endswith("<think>\n\n</think>\n\n")

    def test_content_blocks_are_one_text(self) -> None:
        tokenizer = tinytext.byte_level(CHATML)
        blocks = [
            {"type": "text", "text": "What is the capital"},
            {"type": "text", "text": " of France?"},
        ]
        assert (
            encode_messages(tokenizer, [{"role": "user", "content": blocks}]).tolist()
            == encode_messages(tokenizer, [QUESTION]).tolist()
        )

    def test_tools_and_their_calls_reach_the_template(self) -> None:
        tokenizer = tinytext.byte_level(TOOLS)
        call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        shown = text_of(
            tokenizer,
            encode_messages(
                tokenizer, [QUESTION, {"role": "assistant", "tool_calls": [call]}], [tool]
            ),
        )
        assert '"name": "f", "parameters": {}' in shown
        assert '"arguments": {"x": 1}' in shown

    @pytest.mark.parametrize(
        ("template", "messages", "kwargs", "reason"),
        [
            (None, [QUESTION], None, "has no chat template: give the prompt as text"),
            (TRIMMING, [QUESTION, QUESTION], None, "refuses these messages: Conversation roles"),
            ("{{ messages[0].a.b }}", [QUESTION], None, "fails on these messages (UndefinedError)"),
            ("{{ messages[0].content + 1 }}", [QUESTION], None, "fails on these messages"),
            ("{% if %}", [QUESTION], None, "(TemplateSyntaxError)"),
            ("{{ 1 // 0 }}", [QUESTION], None, "(ZeroDivisionError)"),
            (
                "{{ messages.__class__.__mro__[1].__subclasses__() }}",
                [QUESTION],
                None,
                "(SecurityError)",
            ),
            ({"other": CHATML}, [QUESTION], None, "fails on these messages (ValueError)"),
            (CHATML, [QUESTION], {"tokenize": True}, "cannot set 'tokenize': remove it"),
            (CHATML, [QUESTION], {"tools": []}, "cannot set 'tools'"),
            (DATED, [QUESTION], {"date": "31 July"}, 'must be such as "2026-07-31"'),
            (DATED, [QUESTION], {"date": 20260731}, 'must be such as "2026-07-31"'),
        ],
    )
    def test_what_a_template_refuses_is_an_error_with_its_reason(
        self, template: Any, messages: Any, kwargs: Any, reason: str
    ) -> None:
        tokenizer = tinytext.byte_level(template)
        for encode in (encode_messages, encode_chat_prefix):
            with pytest.raises(TemplateError) as caught:
                encode(tokenizer, messages, chat_template_kwargs=kwargs)
            assert reason in str(caught.value)

    def test_a_template_may_come_with_the_chat(self) -> None:
        tokenizer = tinytext.byte_level({"default": PLAIN, "special": CHATML})
        expected = encode_messages(tinytext.byte_level(CHATML), [QUESTION]).tolist()
        for choice in (CHATML, "special"):
            kwargs = {"chat_template": choice}
            assert encode_messages(tokenizer, [QUESTION], None, kwargs).tolist() == expected

    def test_the_callers_values_stay_as_they_are(self) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
        kwargs = {"date": "2026-01-02", "x": 1}
        encode_chat_prefix(tinytext.byte_level(DATED), messages, [{"a": None}], kwargs)
        assert messages == [
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}
        ]
        assert kwargs == {"date": "2026-01-02", "x": 1}


class TestClock:
    def test_the_date_is_the_batchs(self) -> None:
        tokenizer = tinytext.byte_level(DATED)
        shown = text_of(tokenizer, encode_messages(tokenizer, [QUESTION], now=NOON))
        assert "Today is 31 Jul 2026 (12:00)" in shown

    def test_the_callers_date_wins(self) -> None:
        tokenizer = tinytext.byte_level(DATED)
        for date, day in (("2024-02-29", "29 Feb 2024 (00:00)"), ("20240301T0930", "01 Mar 2024")):
            kwargs = {"date": date}
            shown = text_of(tokenizer, encode_messages(tokenizer, [QUESTION], None, kwargs))
            assert f"Today is {day}" in shown

    def test_what_was_dated_can_be_had_again(self) -> None:
        tokenizer = tinytext.byte_level(DATED)
        stored = encode_chat_prefix(tokenizer, [QUESTION], now=NOON)
        kwargs = dated_kwargs(tokenizer, {"x": 1}, None, NOON)
        assert kwargs == {"x": 1, "date": "2026-07-31T12:00:00"}
        later = encode_messages(tokenizer, [QUESTION], None, kwargs, now=datetime(2031, 1, 1, 3, 4))
        assert begins(stored, later)
        assert not begins(stored, encode_messages(tokenizer, [QUESTION], now=datetime(2031, 1, 1)))

    def test_other_templates_need_no_date(self) -> None:
        tokenizer = tinytext.byte_level(CHATML)
        assert dated_kwargs(tokenizer, None, None, NOON) is None
        assert dated_kwargs(tokenizer, {"a": 1}, None, NOON) == {"a": 1}
        assert dated_kwargs(tinytext.byte_level(), None, None, NOON) is None

    def test_a_date_is_passed_on_where_no_clock_is_asked(self) -> None:
        tokenizer = tinytext.byte_level("{{ date }}" + CHATML)
        shown = text_of(tokenizer, encode_messages(tokenizer, [QUESTION], None, {"date": "today"}))
        assert shown.startswith("today<|im_start|>")

    def test_formats_may_hold_quotes_and_escapes(self) -> None:
        template = r"""{{ strftime_now('%Y "\n" %d') + strftime_now( format="%m'" ) }}"""
        tokenizer = tinytext.byte_level(template)
        shown = text_of(tokenizer, encode_messages(tokenizer, [QUESTION], now=NOON))
        assert shown == '2026 "\n" 3107\''


class TestBoundary:
    @pytest.mark.parametrize("name", TEMPLATES)
    @pytest.mark.parametrize("kind", TOKENIZERS)
    @pytest.mark.parametrize("chat", CHATS)
    @settings(max_examples=15, deadline=None)
    @given(
        content=st.one_of(
            st.sampled_from(["", " ", "\n\n", "a", "Hello world", "0", "\t(", "<think>", "é"]),
            st.text(alphabet=st.characters(codec="utf-8"), max_size=12),
        ),
        add_generation_prompt=st.booleans(),
    )
    def test_a_stored_chat_begins_every_continuation(
        self, name: str, kind: str, chat: str, content: str, add_generation_prompt: bool
    ) -> None:
        tokenizer, messages = TOKENIZERS[kind](TEMPLATES[name]), CHATS[chat]
        try:
            stored = encode_chat_prefix(tokenizer, messages, now=NOON)
        except TemplateError:
            assert name in ("brackets", "trimming")
            assert chat not in ("question", "answered")
            return
        last = "call" if "tool_calls" in messages[-1] else messages[-1]["role"]
        following = {"user": ["assistant", "user"], "tool": ["assistant", "tool"], "call": ["tool"]}
        for role in following.get(last, ["user"]):
            follow_up = [*messages, {"role": role, "content": content}]
            try:
                whole = encode_messages(
                    tokenizer,
                    follow_up,
                    add_generation_prompt=add_generation_prompt,
                    now=NOON,
                )
            except TemplateError:
                continue
            assert begins(stored, whole), (role, content)
        if last in ("user", "tool"):
            assert begins(stored, encode_messages(tokenizer, messages, now=NOON))

    @pytest.mark.parametrize(
        ("name", "chat", "ending"),
        [
            ("chatml", "question", "of France?<|im_end|>\n"),
            ("chatml", "system", "assistant.\n<|im_end|>\n<|im_start|>user"),
            ("chatml", "answered", "Paris.<|im_end|>\n"),
            ("thinking", "question", "of France?<|im_end|>\n"),
            ("thinking", "answered", "<|im_start|>assistant\nParis.<|im_end|>\n<|im_start|>user"),
            ("trimming", "question", "of France?<|im_end|>\n"),
            ("trimming", "system and question", "of France?<|im_end|>\n"),
            ("plain", "question", "of France?\n"),
            ("brackets", "question", "of France? [/INST]"),
            ("tools", "tool answered", '<|im_start|>tool\n0""<|im_end|>\n'),
        ],
    )
    def test_where_it_lies(self, name: str, chat: str, ending: str) -> None:
        tokenizer = tinytext.byte_level(TEMPLATES[name])
        shown = text_of(tokenizer, encode_chat_prefix(tokenizer, CHATS[chat], now=NOON))
        assert shown.endswith(ending)

    @pytest.mark.parametrize("chat", CHATS)
    def test_it_holds_no_generation_prompt_and_no_thinking(self, chat: str) -> None:
        tokenizer = tinytext.byte_level(THINKING)
        stored = text_of(tokenizer, encode_chat_prefix(tokenizer, CHATS[chat]))
        assert not stored.endswith("assistant\n")
        # A call's thinking stays until a user says something: the tool's result comes before.
        assert ("<think>" in stored) == chat.startswith("tool")

    def test_thinking_on_or_off_is_stored_alike(self) -> None:
        tokenizer = tinytext.byte_level(THINKING)
        kwargs = {"enable_thinking": False}
        assert (
            encode_chat_prefix(tokenizer, [QUESTION], None, kwargs).tolist()
            == encode_chat_prefix(tokenizer, [QUESTION]).tolist()
        )

    def test_the_boundary_counts_its_tokens(self) -> None:
        tokenizer = tinytext.byte_level(CHATML)
        stored = encode_chat_prefix(tokenizer, [SYSTEM, QUESTION])
        assert stable_chat_boundary(tokenizer, [SYSTEM, QUESTION]) == len(stored)
        assert len(stored) < len(encode_messages(tokenizer, [SYSTEM, QUESTION]))

    def test_a_template_that_moves_the_chat_keeps_what_the_answer_needs(self) -> None:
        # The system's text goes into the last question, wherever that is.
        template = """
{%- for m in messages %}{% if m.role != 'system' %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if loop.last and m.role == 'user' %}{{ messages[0].content }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
        tokenizer = tinytext.byte_level(template)
        system = {"role": "system", "content": "You are a helpful assistant. " * 5}
        (found,) = encode_chat_prefixes(tokenizer, [Chat(messages=[system, QUESTION])])
        assert not isinstance(found, UsageError)
        assert text_of(tokenizer, found.ids).endswith("of France?<|im_end|>\n")
        assert begins(found.ids, encode_messages(tokenizer, [system, QUESTION]))
        answered = encode_messages(tokenizer, [system, QUESTION, ANSWER])
        assert common_prefix(found.ids, answered) >= found.stable
        assert text_of(tokenizer, found.ids[: found.stable]) == "<|im_start|>user\n"
        assert stable_chat_boundary(tokenizer, [system, QUESTION]) == found.stable

    def test_many_chats_give_ids_or_errors_in_order(self) -> None:
        tokenizer = tinytext.byte_level(TRIMMING)
        chats = [
            Chat(messages=[QUESTION]),
            Chat(messages=[QUESTION, QUESTION]),
            Chat(messages=[]),
            Chat(messages=[SYSTEM, QUESTION]),
        ]
        first, second, third, fourth = encode_chat_prefixes(tokenizer, chats)
        assert isinstance(second, TemplateError)
        assert isinstance(third, UsageError)
        assert "messages is empty" in str(third)
        for found, chat in ((first, chats[0]), (fourth, chats[3])):
            assert not isinstance(found, UsageError)
            assert found.stable == len(found.ids)
            assert found.ids.tolist() == encode_chat_prefix(tokenizer, chat.messages).tolist()
        assert encode_chat_prefixes(tokenizer, []) == []

    @settings(deadline=None)
    @given(
        stem=st.text(alphabet=st.sampled_from("ab \n(<|im_start|>"), max_size=12),
        cut=st.sampled_from(["", "<|im_end|>", "<|im_end|>\n<|im_start|>", "<think>\n\n\n", "<|"]),
        tails=st.lists(
            st.text(alphabet=st.sampled_from("ab \n(<|im_start|>"), max_size=8), min_size=1
        ),
    )
    def test_cutting_at_special_tokens_changes_nothing(
        self, stem: str, cut: str, tails: list[str]
    ) -> None:
        texts = [f"<bos>{stem}{cut}{tail}" for tail in tails]
        for make in TOKENIZERS.values():
            tokenizer = make()
            whole = [
                np.array(tokenizer.encode(text, add_special_tokens=False), np.uint32)
                for text in texts
            ]
            expected = reduce(lambda a, b: a[: common_prefix(a, b)], whole)
            chat = boundary.Renderings(now=texts[:1], later=texts[1:])
            (found,) = boundary.chat_prefixes(tokenizer, [chat])
            assert found.stable == len(expected)
            assert found.ids[: found.stable].tolist() == expected.tolist()
            assert begins(found.ids, whole[0])

    def test_a_token_that_could_grow_is_no_place_to_cut(self) -> None:
        from tokenizers import AddedToken

        tokenizer = tinytext.byte_level()
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [AddedToken("<|im_end|>\nx", normalized=False)]}
        )
        texts = ["a<|im_end|>\na", "a<|im_end|>\nx"]
        whole = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        assert whole[0][1] != whole[1][1]
        chat = boundary.Renderings(now=texts, later=[])
        assert boundary.chat_prefixes(tokenizer, [chat])[0].ids.tolist() == whole[0][:1]


class TestMessages:
    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            ("hello", "messages must be a list, not a string"),
            ({"role": "user"}, "messages must be a list, not an object"),
            ([], "messages is empty"),
            (
                [QUESTION, 3],
                'message 2 must be an object with "role" and "content", not an integer',
            ),
            ([{"content": "x"}], "message 1 has no role"),
            ([{"role": "", "content": "x"}], "message 1 has no role"),
            ([{"role": 7, "content": "x"}], "the role of message 1 must be a string"),
            ([{"role": "user"}], "message 1 has no content"),
            ([{"role": "user", "content": None}], "message 1 has no content"),
            ([{"role": "user", "content": 5}], "a string or a list of text blocks, not an integer"),
            (
                [{"role": "user", "content": ["x"]}],
                "content block 1 of message 1 must be an object, not a string",
            ),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                "content block 1 of message 1 is of type 'image_url': only text can be prefilled",
            ),
            ([{"role": "user", "content": [{"text": "x"}]}], "is without a type"),
            ([{"role": "user", "content": [{"type": "text"}]}], 'as a string in "text"'),
            (
                [{"role": "assistant", "tool_calls": "f()"}],
                "tool_calls of message 1 must be a list",
            ),
            ([{"role": "assistant", "tool_calls": ["f"]}], "tool call 1 of message 1 must be"),
        ],
    )
    def test_faults_are_named(self, messages: Any, reason: str) -> None:
        with pytest.raises(UsageError) as caught:
            check_messages(messages)
        assert reason in str(caught.value)

    def test_arguments_that_are_no_object_stay_text(self) -> None:
        for text in ("", "{", "[1]", "7"):
            call = {"function": {"name": "f", "arguments": text}}
            checked = check_messages([{"role": "assistant", "tool_calls": [call]}])
            assert checked[0]["tool_calls"] == [call]

    def test_tools(self) -> None:
        assert check_tools(None) is None
        assert check_tools([]) is None
        assert check_tools([{"a": 1}]) == [{"a": 1}]
        with pytest.raises(UsageError, match="tools must be a list, not an object"):
            check_tools({"a": 1})
        with pytest.raises(UsageError, match="tool 2 must be an object, not a string"):
            check_tools([{}, "f"])
