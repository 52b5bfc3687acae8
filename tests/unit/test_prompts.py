from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import InvalidName, InvalidPrompts, UsageError
from kvq.store.names import check_name, valid_name
from kvq_producer.prompts import Prompt, PromptFile, faults, open_prompts, read_prompts
from kvq_producer.prompts.fields import FIELDS
from kvq_producer.prompts.forms import PROMPT_KEYS
from kvq_producer.prompts.lines import FOREIGN, MAX_DEPTH

USER = {"role": "user", "content": "Hi"}

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["user", "assistant", "text", "function", "7d", "q8", "/v1/completions"]),
)
KEYS = st.one_of(
    st.sampled_from(
        sorted({*PROMPT_KEYS, *FIELDS, "role", "content", "type", "input", "function", "name"})
    ),
    st.text(max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": VALUES}
    ),
    max_size=3,
)
LINES = st.dictionaries(KEYS, st.one_of(VALUES, MESSAGES), max_size=5)


def read(*lines: Any, **options: Any) -> PromptFile:
    """A file of `lines`: bytes as they are, anything else as JSON."""
    data = b"\n".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines
    )
    return read_prompts(io.BytesIO(data), "prompts.jsonl", **options)


def one(line: Any) -> Prompt:
    (prompt,) = read(line).read_all()
    return prompt


def reasons(*lines: Any, **options: Any) -> list[str]:
    """The faults of a file, as `number: reason`."""
    file = read(*lines, **options)
    for _ in file:
        pass
    with pytest.raises(InvalidPrompts):
        file.check()
    return [f"{number}: {reason}" for number, reason in file.faults.kept]


def reason(line: Any, **options: Any) -> str:
    (only,) = reasons(line, **options)
    return only.removeprefix("1: ")


class TestForms:
    def test_text(self) -> None:
        assert one({"prompt": "Once"}) == Prompt(line=1, custom_id="line-1", text="Once")
        assert one({"text": " \n"}).text == " \n"

    def test_token_ids(self) -> None:
        assert one({"token_ids": [0, 7, 2**32 - 1]}).token_ids == (0, 7, 2**32 - 1)
        assert one({"prompt": [1, 2]}).token_ids == (1, 2)

    def test_messages(self) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        prompt = one(
            {"messages": [USER], "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
        )
        assert prompt.messages == [USER]
        assert prompt.tools == tools
        assert prompt.chat_template_kwargs == {"enable_thinking": False}
        assert (prompt.text, prompt.token_ids) == (None, None)

    def test_a_bare_list_of_messages(self) -> None:
        assert one([USER, {"role": "assistant", "content": "Yes"}]).messages == [
            USER,
            {"role": "assistant", "content": "Yes"},
        ]

    def test_a_system_text_beside_messages_is_their_first(self) -> None:
        assert one({"system": "Be brief.", "messages": [USER]}).messages == [
            {"role": "system", "content": "Be brief."},
            USER,
        ]
        assert one({"system": "", "messages": [USER]}).messages == [USER]

    def test_text_blocks_become_one_text(self) -> None:
        blocks = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
        assert one([{"role": "user", "content": blocks}]).messages == [
            {"role": "user", "content": "Hi there"}
        ]

    def test_openai_chat_lines(self) -> None:
        prompt = one(
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "org/name",
                    "messages": [USER],
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                    "max_tokens": 0,
                    "metadata": {"k": "v"},
                },
            }
        )
        assert (prompt.custom_id, prompt.model, prompt.metadata) == ("a", "org/name", {"k": "v"})
        assert prompt.messages == [USER]
        assert prompt.tools == [{"type": "function", "function": {"name": "f"}}]

    def test_openai_completions_and_bare_bodies(self) -> None:
        line = {"custom_id": "a", "url": "https://host/v1/completions/", "body": {"prompt": "x"}}
        assert one(line).text == "x"
        assert one({"body": {"messages": [USER]}}).messages == [USER]
        assert one({"body": {"prompt": [5, 6]}}).token_ids == (5, 6)

    def test_openai_responses(self) -> None:
        body = {
            "instructions": "Be brief.",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "Hi"}],
                }
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        }
        prompt = one({"custom_id": "a", "url": "/v1/responses", "body": body})
        assert prompt.messages == [{"role": "system", "content": "Be brief."}, USER]
        assert prompt.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert one({"url": "/v1/responses", "body": {"input": "Hi"}}).messages == [USER]

    def test_anthropic(self) -> None:
        params = {
            "model": "m",
            "max_tokens": 1024,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "x"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        }
        prompt = one({"custom_id": "a", "params": params})
        assert prompt.messages == [{"role": "system", "content": "Be brief."}, USER]
        assert prompt.model == "m"
        assert prompt.tools == [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
            }
        ]

    def test_null_counts_as_absent(self) -> None:
        line: dict[str, Any] = dict.fromkeys([*FIELDS, *PROMPT_KEYS], None)
        assert one({**line, "prompt": "x"}) == Prompt(line=1, custom_id="line-1", text="x")

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ({}, 'no prompt: give one of "prompt", "text", "messages" or "token_ids"'),
            ({"custom_id": "a"}, "no prompt: give one of"),
            ({"prompt": None}, "no prompt: give one of"),
            ({"promt": "x"}, 'no prompt: did you mean "prompt" instead of "promt"?'),
            ({"input_ids": [1]}, 'did you mean "token_ids" instead of "input_ids"?'),
            ({"input": "x"}, 'did you mean "prompt" instead of "input"?'),
            ({"prompt": "a", "text": "b"}, 'more than one prompt: keep one of "prompt" and "text"'),
            (
                {"body": {"prompt": "a"}, "messages": [USER]},
                'more than one prompt: keep one of "body" and "messages"',
            ),
            (
                {"body": {"prompt": "a", "messages": [USER]}},
                'more than one prompt in body: keep one of "prompt" and "messages"',
            ),
            ({"body": {"model": "m"}}, "no prompt in body: give one of"),
            ({"params": {"model": "m"}}, "no prompt in params: give one of"),
            ({"body": []}, "body must be an object, not a list"),
            ({"params": "x"}, "params must be an object, not a string"),
            ({"prompt": ""}, "the prompt is empty"),
            ({"text": ""}, "the text is empty"),
            ({"prompt": 5}, "prompt must be a string, not an integer"),
            ({"prompt": {"a": 1}}, "prompt must be a string, not an object"),
            ({"prompt": ["a", "b"]}, "prompt is a list of 2: write one line for each prompt"),
            ({"prompt": []}, "prompt is a list of 0"),
            ({"text": [1, 2]}, "text is a list of 2"),
            ({"token_ids": []}, "token_ids is empty"),
            ({"token_ids": "1 2"}, "token_ids must be a list of integers, not a string"),
            ({"token_ids": [1, -1]}, "below 2**32: number 2 is negative"),
            ({"token_ids": [1, 2, 2**32]}, "number 3 is 2**32 or more"),
            ({"token_ids": [1, True]}, "token_ids must be integers: number 2 is true"),
            ({"token_ids": [1.0]}, "token_ids must be integers: number 1 is a number"),
            ({"token_ids": ["1"]}, "token_ids must be integers: number 1 is a string"),
            ({"token_ids": [[1]]}, "token_ids must be integers: number 1 is a list"),
            ({"prompt": [1, "a"]}, "prompt must be integers: number 2 is a string"),
            ({"messages": []}, "messages is empty"),
            ([], "messages is empty"),
            ({"messages": "Hi"}, "messages must be a list, not a string"),
            ([{"content": "x"}], "message 1 has no role"),
            ([USER, {"role": "user"}], "message 2 has no content"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
                "content block 1 of message 1 is of type 'image_url': only text can be prefilled",
            ),
            (
                {"params": {"messages": [{"role": "user", "content": [{"type": "image"}]}]}},
                "is of type 'image'",
            ),
            ({"params": {"messages": [USER], "system": [{"type": "image"}]}}, "of type 'image'"),
            ({"messages": [USER], "tools": {}}, "tools must be a list, not an object"),
            ({"messages": [USER], "chat_template_kwargs": [1]}, "must be an object, not a list"),
            ({"prompt": "x", "tools": [{}]}, '"tools" goes with "messages" only'),
            ({"text": "x", "system": "s"}, '"system" goes with "messages" only'),
            ({"messages": [USER], "instructions": "i"}, "write a system message"),
            (
                {"messages": [USER], "functions": [{}]},
                '"functions" is not supported: write them as',
            ),
            ({"body": {"messages": [USER], "documents": [{}]}}, '"documents" is not supported'),
            ({"body": {"input": "x", "previous_response_id": "r"}}, "write the whole conversation"),
            ({"body": {"prompt": "x", "suffix": "y"}}, '"suffix" is not supported'),
            ({"body": {"prompt": "x", "ttl": 5}}, '"ttl" belongs beside "body", not inside it'),
            ({"params": {"prompt": "x", "name": "n"}}, '"name" belongs beside "params"'),
            ({"method": "GET", "body": {"prompt": "x"}}, 'method must be "POST"'),
            ({"url": "/v1/embeddings", "body": {"input": "x"}}, "has no prompt to prefill: use"),
            ({"url": 5, "body": {"prompt": "x"}}, "url must be a string, not an integer"),
            (
                {"url": "/v1/chat/completions", "body": {"prompt": "x"}},
                'for /v1/chat/completions needs "messages", not "prompt"',
            ),
            ({"url": "/v1/completions", "body": {}}, 'for /v1/completions needs "prompt"'),
            ({"body": {"input": ""}}, "the input is empty"),
            ({"body": {"input": 5}}, "input must be a string or a list, not an integer"),
            ({"body": {"input": ["x"]}}, "item 1 of input must be an object, not a string"),
            ({"body": {"input": [{"type": "reasoning"}]}}, "is of type 'reasoning'"),
            ({"body": {"input": [{"type": []}]}}, "only messages are supported"),
            (
                {"body": {"messages": [USER], "tools": [{"type": "web_search"}]}},
                "tool 1 is of type 'web_search', which is not part of the prompt",
            ),
            (
                {"params": {"messages": [USER], "tools": [{"type": "bash_20250124"}]}},
                "tool 1 is of type 'bash_20250124'",
            ),
            ({"params": {"messages": [USER], "tools": ["f"]}}, "tool 1 must be an object"),
            ({"params": {"messages": [USER], "tools": {}}}, "tools must be a list"),
            (USER, "a single message: write the messages of one chat as a list on one line"),
            (
                [{"prompt": "a"}, {"prompt": "b"}],
                "a list of prompts: write each on a line of its own",
            ),
            ([1, 2], 'a list of numbers: write {"token_ids": [...]}'),
            ("x", 'a line must be an object or a list of messages, not a string: write {"text"'),
            (5, "not an integer"),
            (None, "not null"),
            (True, "not true"),
        ],
    )
    def test_what_is_no_prompt_says_what_to_do(self, line: Any, why: str) -> None:
        assert why in reason(line)


class TestFields:
    def test_all_of_them(self) -> None:
        line = {
            "prompt": "x",
            "custom_id": "ä 1",
            "name": "a.B_c-1",
            "model": "org/m",
            "ttl": "1h30m",
            "pin": True,
            "codec": "q4",
            "priority": -3,
            "metadata": {"a": [1, None]},
        }
        assert one(line) == Prompt(
            line=1,
            custom_id="ä 1",
            name="a.B_c-1",
            model="org/m",
            ttl=5400.0,
            pin=True,
            codec="q4",
            priority=-3,
            metadata={"a": [1, None]},
            text="x",
        )

    @pytest.mark.parametrize(
        ("ttl", "seconds"),
        [(60, 60.0), (0.5, 0.5), ("90", 90.0), ("7d", 604800.0), ("12h", 43200.0)],
    )
    def test_ttl(self, ttl: Any, seconds: float) -> None:
        assert one({"prompt": "x", "ttl": ttl}).ttl == seconds

    def test_they_may_stand_beside_a_batch_line(self) -> None:
        line = {"body": {"prompt": "x", "model": "m"}, "model": "m", "name": "n", "pin": False}
        prompt = one(line)
        assert (prompt.model, prompt.name, prompt.pin) == ("m", "n", False)

    @pytest.mark.parametrize(
        ("field", "value", "why"),
        [
            ("custom_id", 7, 'custom_id must be a string: write "7" in quotes'),
            ("custom_id", "", "custom_id is empty"),
            ("custom_id", True, "custom_id must be a string, not true"),
            ("custom_id", "x" * 513, "custom_id has 513 characters: use at most 512"),
            ("name", 7, "name must be a string, not an integer"),
            ("name", "", "name must not be empty"),
            ("name", "..x", "must begin with a letter or a digit"),
            ("name", "a/b", "has the character '/': use letters"),
            ("name", "n" * 129, "has 129 characters: use at most 128"),
            ("model", [], "model must be a string, not a list"),
            ("model", " ", "model is empty"),
            ("ttl", True, 'ttl must be seconds or such as "7d" or "12h", not true'),
            ("ttl", 0, "ttl must be more than 0"),
            ("ttl", -1, "ttl must be more than 0"),
            ("ttl", "soon", "ttl: 'soon' is not a duration"),
            ("ttl", 10**400, "ttl: "),
            ("ttl", 10**10, "more than 100 years"),
            ("pin", "yes", "pin must be true or false, not a string"),
            ("pin", 1, "pin must be true or false, not an integer"),
            ("codec", "q5", "codec must be one of raw, q8, q4, auto, not 'q5'"),
            ("codec", 8, "codec must be one of raw, q8, q4, auto, not an integer"),
            ("priority", 1.5, "priority must be an integer, not a number"),
            ("priority", True, "priority must be an integer, not true"),
            ("priority", 10**6, "priority must be from -1000 to 1000"),
            ("metadata", [], "metadata must be an object, not a list"),
        ],
    )
    def test_faults(self, field: str, value: Any, why: str) -> None:
        assert why in reason({"prompt": "x", field: value})

    def test_two_models_are_refused(self) -> None:
        line = {"model": "a", "body": {"prompt": "x", "model": "b"}}
        assert reason(line).startswith("two models")

    def test_all_faults_of_a_line_are_given(self) -> None:
        found = reasons({"prompt": "", "ttl": "x", "codec": "q5", "name": "/"})
        assert [text.split()[1] for text in found] == ["the", "the", "ttl:", "codec"]

    def test_ids_and_names_are_unique(self) -> None:
        assert reasons(
            {"prompt": "x", "custom_id": "a", "name": "n"},
            {"prompt": "y", "custom_id": "a"},
            {"prompt": "y", "name": "n"},
            {"prompt": "y", "name": "N"},
            {"prompt": "y", "custom_id": "line-6"},
            {"prompt": "y"},
        ) == [
            "2: custom_id 'a' is that of line 1: each must be unique",
            "3: name 'n' is that of line 1: each must be unique",
            "4: name 'N' is that of line 1, but for upper and lower case ('n'): "
            "each must be unique",
            "6: custom_id 'line-6' is that of line 5: each must be unique",
        ]

    def test_an_id_of_a_faulty_line_is_taken(self) -> None:
        assert [
            text[:14] for text in reasons({"custom_id": "a"}, {"prompt": "", "custom_id": "a"})
        ] == [
            "1: no prompt: ",
            "2: the prompt ",
            "2: custom_id '",
        ]


class TestLines:
    def test_blank_lines_carriage_returns_and_a_byte_order_mark(self) -> None:
        data = (
            b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n\n{"prompt": "b"}\r\n{"prompt": "\xc3\xa9"}'
        )
        prompts = read(data).read_all()
        assert [(prompt.line, prompt.text) for prompt in prompts] == [(1, "a"), (5, "b"), (6, "é")]
        assert [prompt.custom_id for prompt in prompts] == ["line-1", "line-5", "line-6"]

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            (b"{", "not JSON at column 2: Expecting property name"),
            (b'{"prompt": "a",}', "not JSON at column 16: "),
            (b'{"prompt": "a"} {"prompt": "b"}', "not JSON at column 17: Extra data"),
            (b'{"prompt": "a"},', "each line must be one whole JSON object or list"),
            (b"prompt", "not JSON at column 1: Expecting value"),
            (b'{"prompt": "a\tb"}', "not JSON at column 14: Invalid control character"),
            (b'{"prompt": "\xff"}', "invalid UTF-8 at byte 13 (0xff): save the file as UTF-8"),
            (b'{"prompt": "\xed\xa0\xbd"}', "invalid UTF-8 at byte 13 (0xed)"),
            (b'{"prompt": "\\ud83d"}', "half a surrogate pair (\\ud83d) in a string"),
            (b'{"prompt": "x", "metadata": {"\\udc00": 1}}', "half a surrogate pair (\\udc00)"),
            (b'{"prompt": "x", "ttl": NaN}', "NaN is not a JSON number"),
            (b'{"prompt": "x", "ttl": -Infinity}', "-Infinity is not a JSON number"),
            (b'{"prompt": "x", "ttl": 1e999}', "the number 1e999 is too large"),
            (b'{"prompt": "x", "ttl": ' + b"9" * 5000 + b"}", "a number has too many digits"),
            (b'{"prompt": "x", "prompt": "y"}', 'the key "prompt" is given twice'),
            (b"[" * 100_000, "nested more than 100 deep"),
            (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested more than 100 deep"),
            (b"[" * 101 + b"]" * 101, "nested more than 100 deep"),
            (b"\xff\xfe{\x00", "this is UTF-16: save the file as UTF-8"),
            (b"\x1f\x8b\x08\x00", "this is compressed: unpack the file first"),
        ],
    )
    def test_what_cannot_be_read(self, line: bytes, why: str) -> None:
        assert why in reason(line)

    def test_pairs_and_depth_that_are_allowed(self) -> None:
        assert one(b'{"prompt": "\\ud83d\\ude00"}').text == "😀"
        deep: Any = 1
        for _ in range(MAX_DEPTH - 2):
            deep = [deep]
        line = {"prompt": "{" * 300, "metadata": {"deep": deep}}
        assert one(line).metadata == {"deep": deep}
        assert "nested" in reason({"prompt": "x", "metadata": {"deep": [[deep]]}})
        assert len(one([USER] * 200).messages or []) == 200

    def test_long_lines_are_skipped_and_the_next_is_read(self) -> None:
        exact = b'{"prompt": "x"}'
        size = len(exact)
        for end in (b"\n", b"\r\n"):
            stream = io.BytesIO(b"x" * (size + 1) + end + exact + end + b"y" * 5000 + end + exact)
            file = read_prompts(stream, "f", max_line=size)
            assert [prompt.line for prompt in file] == [2, 4]
            assert [fault.line for fault in file.faults.kept] == [1, 3]
            assert file.faults.kept[0].reason == f"longer than {size} bytes, the limit of a line"
        stream = io.BytesIO(exact + b"\r\r\r\r\r" + exact)
        assert [fault.line for fault in _read_out(stream, size).faults.kept] == [1]

    def test_a_long_line_is_never_held(self) -> None:
        class Endless(io.RawIOBase):
            left = 1 << 28

            def readable(self) -> bool:
                return True

            def readinto(self, buffer: Any) -> int:
                count = min(len(buffer), self.left)
                buffer[:count] = b"x" * count
                self.left -= count
                return count

        import tracemalloc

        tracemalloc.start()
        try:
            file = read_prompts(io.BufferedReader(Endless()), "f", max_line=1 << 16)
            assert list(file) == []
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
        assert file.faults.count == 1

    def test_prompts_come_before_the_stream_ends(self) -> None:
        class Pipe(io.BytesIO):
            def readline(self, size: int | None = -1) -> bytes:
                line = super().readline(size)
                assert line, "read past what was asked for"
                return line

        prompts = iter(read_prompts(Pipe(b'{"prompt": "a"}\n{"prompt": "b"}\n'), "pipe"))
        assert [next(prompts).text, next(prompts).text] == ["a", "b"]

    def test_a_stream_that_fails(self) -> None:
        class Failing(io.BytesIO):
            def readline(self, size: int | None = -1) -> bytes:
                raise OSError(5, "Input/output error")

        with pytest.raises(UsageError, match="f cannot be read: Input/output error"):
            list(read_prompts(Failing(), "f"))


class TestFile:
    def test_every_fault_at_once(self) -> None:
        file = read({"prompt": "a"}, b"{", {"text": ""}, {"prompt": "b"})
        with pytest.raises(InvalidPrompts) as caught:
            file.read_all()
        assert caught.value.source == "prompts.jsonl"
        assert [number for number, _ in caught.value.faults] == [2, 3]
        assert "prompts.jsonl: 2 faults; nothing was submitted." in str(caught.value)
        assert "  line 3: the text is empty" in str(caught.value)
        assert caught.value.exit_status == 2

    def test_faulty_lines_can_be_skipped(self) -> None:
        file = read({"prompt": "a"}, b"{", {"prompt": "b", "ttl": -1, "pin": 3}, {"prompt": "c"})
        assert [prompt.text for prompt in file] == ["a", "c"]
        assert (file.prompts, file.faults.lines, file.faults.count) == (2, 2, 3)

    def test_of_many_faults_the_first_are_shown_and_all_are_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(InvalidPrompts) as caught:
            read(*[b"{"] * 250).read_all()
        shown = str(caught.value).splitlines()
        assert shown[0].startswith("prompts.jsonl: 250 faults")
        assert len(shown) == 102
        assert shown[-1] == "  and 150 more"
        assert len(caught.value.faults) == 250
        monkeypatch.setattr(faults, "KEPT", 120)
        with pytest.raises(InvalidPrompts) as caught:
            read(*[b"{"] * 250).read_all()
        assert (len(caught.value.faults), caught.value.count) == (120, 250)
        assert str(caught.value).splitlines()[-1] == "  and 150 more"

    def test_a_hundred_faults_are_all_shown(self) -> None:
        with pytest.raises(InvalidPrompts) as caught:
            read(*[b"{"] * 100).read_all()
        assert str(caught.value).splitlines()[-1].startswith("  line 100: ")

    @pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
    def test_a_file_without_prompts(self, data: bytes) -> None:
        with pytest.raises(UsageError, match=r"prompts\.jsonl holds no prompts"):
            read(data).read_all()

    def test_unknown_keys_are_named_once(self) -> None:
        file = read(
            {"prompt": "x", "ttll": 5, "max_tokens": 3, "temperature": 0},
            {"prompt": "y", "ttll": 5, "zzz": 1, "costum_id": "a"},
            {"body": {"prompt": "z", "whatever": 1}},
        )
        assert len(file.read_all()) == 3
        assert file.warnings == [
            "line 1: the key 'ttll' is ignored; did you mean \"ttl\"?",
            "line 2: the key 'costum_id' is ignored; did you mean \"custom_id\"?",
            "line 2: the key 'zzz' is ignored",
        ]
        many = read({"prompt": "x", **{f"column_{number}": 1 for number in range(500)}})
        assert len(many.read_all()) == 1
        assert len(many.warnings) == 20

    def test_opening(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text('{"prompt": "a"}\n')
        with open_prompts(path) as file:
            assert [prompt.text for prompt in file] == ["a"]
            assert file.source == str(path)
            assert file.bytes == 16
        with open_prompts("-", stdin=io.BytesIO(b'{"prompt": "b"}')) as file:
            assert [prompt.text for prompt in file] == ["b"]
            assert file.source == "standard input"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "c"}')))
        with open_prompts("-") as file:
            assert [prompt.text for prompt in file] == ["c"]

    @pytest.mark.parametrize(
        ("name", "why"),
        [("gone.jsonl", "No such file"), (".", "Is a directory"), ("a\0b", "is not a path")],
    )
    def test_what_cannot_be_opened(self, tmp_path: Path, name: str, why: str) -> None:
        with pytest.raises(UsageError, match=why), open_prompts(tmp_path / name):
            pass


class TestAnyInput:
    """Whatever comes in, each line that is not blank is one prompt, or has a fault."""

    @staticmethod
    def check(lines: list[bytes]) -> None:
        file = read(*lines)
        prompts = list(file)
        seen = {prompt.line for prompt in prompts} | {fault.line for fault in file.faults.kept}
        assert len(prompts) + file.faults.lines == len(seen)
        if not b"\n".join(lines).startswith(tuple(FOREIGN)):
            content = [
                line.removeprefix(b"\xef\xbb\xbf") for line in b"\n".join(lines).split(b"\n")
            ]
            assert seen == {number for number, line in enumerate(content, 1) if line.strip()}
        for fault in file.faults.kept:
            assert fault.reason
            fault.reason.encode()
        for prompt in prompts:
            given = [prompt.text, prompt.messages, prompt.token_ids]
            assert sum(one is not None for one in given) == 1
            assert given != ["", None, None]
            json.dumps(prompt.metadata, allow_nan=False).encode()
        assert len({prompt.custom_id for prompt in prompts}) == len(prompts)

    @settings(deadline=None)
    @given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b" ")), max_size=6))
    def test_bytes(self, lines: list[bytes]) -> None:
        self.check(lines)

    @settings(deadline=None)
    @given(st.lists(st.one_of(VALUES, LINES, MESSAGES), max_size=5))
    def test_json(self, lines: list[Any]) -> None:
        self.check([json.dumps(line).encode() for line in lines])

    @settings(deadline=None)
    @given(LINES, st.data())
    def test_damaged_json(self, line: Any, data: st.DataObject) -> None:
        raw = bytearray(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != 10))
        self.check([bytes(raw)])


class TestNames:
    @pytest.mark.parametrize("name", ["a", "0", "A.b-c_d", "x" * 128, "9.safetensors"])
    def test_good_ones(self, name: str) -> None:
        assert valid_name(name)
        assert check_name(name) == name

    @pytest.mark.parametrize(
        "name",
        ["", ".", "..", "-a", "_a", ".a", "a/b", "a\\b", "a b", "a\n", "é", "٣", "x" * 129, "a\0"],
    )
    def test_bad_ones(self, name: str) -> None:
        assert not valid_name(name)
        with pytest.raises(InvalidName):
            check_name(name)

    @settings(deadline=None)
    @given(st.text(max_size=200))
    def test_a_valid_name_is_a_plain_file_name(self, name: str) -> None:
        if valid_name(name):
            assert name.isascii()
            assert Path(name).name == name
            assert 1 <= len(name) <= 128


def _read_out(stream: io.BytesIO, max_line: int) -> PromptFile:
    file = read_prompts(stream, "f", max_line=max_line)
    for _ in file:
        pass
    return file
