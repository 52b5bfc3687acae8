from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tinytext

from kvq.errors import InvalidPrompts, MissingExtra, ModelNotFound
from kvq.model.chat import encode_chat_prefix, encode_messages, encode_text, load_tokenizer
from kvq_producer import tokenize as module
from kvq_producer.prompts import Faults, PromptFile, read_prompts
from kvq_producer.tokenize import TokenizedPrompt, tokenize

CHATML = (
    "{{ strftime_now('%Y') }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = tinytext.sentencepiece(CHATML)
    folder = tmp_path_factory.mktemp("models") / "pieces"
    return str(tinytext.save_model(folder, tokenizer, max_position_embeddings=64))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "bytes"
    return str(tinytext.save_model(folder, tinytext.byte_level()))


def read(*lines: Any) -> PromptFile:
    data = "\n".join(json.dumps(line) for line in lines).encode()
    return read_prompts(io.BytesIO(data), "prompts.jsonl")


def run(
    default: str | None, *lines: Any, **options: Any
) -> tuple[list[TokenizedPrompt], list[tuple[int, str]]]:
    file = read(*lines)
    found = list(tokenize(file, default, faults=file.faults, **options))
    return found, [tuple(fault) for fault in file.faults.kept]


class TestIds:
    def test_each_form(self, model: str) -> None:
        found, faults = run(
            model, {"prompt": "Hello world"}, [USER], {"token_ids": [5, 6, 7]}, {"text": "fox"}
        )
        tokenizer = load_tokenizer(model)
        assert faults == []
        assert [one.prompt.line for one in found] == [1, 2, 3, 4]
        assert {one.model for one in found} == {model}
        assert [one.ids.tolist() for one in found] == [
            encode_text(tokenizer, "Hello world").tolist(),
            encode_chat_prefix(tokenizer, [USER]).tolist(),
            [5, 6, 7],
            encode_text(tokenizer, "fox").tolist(),
        ]
        assert all(one.ids.dtype == "uint32" for one in found)

    def test_a_chat_can_be_had_again_on_another_day(self, model: str) -> None:
        (one,), _ = run(model, [USER], now=datetime(2026, 7, 31, 8, 15))
        assert one.chat_template_kwargs == {"date": "2026-07-31T08:15:00"}
        again = encode_messages(load_tokenizer(model), [USER], None, one.chat_template_kwargs)
        assert again[: len(one.ids)].tolist() == one.ids.tolist()

    def test_where_a_chat_must_be_restorable_too(self, model: str) -> None:
        moving = "{% for m in messages %}{{ m.role }}{% if loop.last %}{{ ' x' * 40 }}{% endif %}"
        moving += "{{ m.content }}{% endfor %}"
        kwargs = {"chat_template": moving}
        found, _ = run(model, {"messages": [USER], "chat_template_kwargs": kwargs}, [USER])
        assert [len(one.keep) for one in found] == [1, 0]
        assert 0 < found[0].keep[0] < 10 < 40 < len(found[0].ids)

    def test_one_moment_for_all_chats(self, model: str) -> None:
        found, _ = run(model, *[[USER]] * 3)
        assert len({json.dumps(one.chat_template_kwargs) for one in found}) == 1

    def test_models_may_alternate(self, model: str, other: str) -> None:
        lines = [
            {"prompt": f"Hello {number}", "model": other if number % 3 else None}
            for number in range(20)
        ]
        found, _ = run(model, *lines)
        assert [one.prompt.line for one in found] == list(range(1, 21))
        for number, one in enumerate(found):
            assert one.model == (other if number % 3 else model)
            tokenizer = load_tokenizer(one.model)
            assert one.ids.tolist() == encode_text(tokenizer, f"Hello {number}").tolist()

    def test_many_prompts_in_batches(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_BATCH_PROMPTS", 7)
        lines: list[Any] = [{"prompt": "fox " * (number % 9)} for number in range(1, 40)]
        lines[10] = {"token_ids": [10**6]}
        found, faults = run(model, *lines)
        tokenizer = load_tokenizer(model)
        assert [one.prompt.line for one in found] == [
            line for line in range(1, 40) if line not in (9, 11, 18, 27, 36)
        ]
        assert [line for line, _ in faults] == [9, 11, 18, 27, 36]
        for one in found:
            assert one.ids.tolist() == encode_text(tokenizer, one.prompt.text or "").tolist()

    def test_no_more_than_two_batches_are_read_ahead(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_BATCH_CHARACTERS", 100)
        taken = []

        def prompts() -> Iterator[Any]:
            for prompt in read(*[{"prompt": "x" * 60}] * 10):
                taken.append(prompt.line)
                yield prompt

        next(tokenize(prompts(), model, faults=Faults("f")))
        assert taken == [1, 2, 3, 4, 5, 6]

    def test_a_tokenizer_is_loaded_once_and_only_when_needed(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded: list[Path] = []

        def load(folder: Path) -> Any:
            loaded.append(folder)
            return load_tokenizer(folder)

        monkeypatch.setattr(module, "load_tokenizer", load)
        monkeypatch.setattr(module, "_BATCH_PROMPTS", 2)
        run(model, {"token_ids": [1]}, {"token_ids": [2]})
        assert loaded == []
        run(model, *[{"prompt": "x"}] * 5)
        assert loaded == [Path(model)]


class TestFaults:
    def test_each_has_its_line_and_reason(self, model: str, other: str) -> None:
        gone = "/no/such/model"
        found, faults = run(
            model,
            {"prompt": "fox"},
            {"token_ids": [1] * 65},
            {"token_ids": [1] * 64},
            {"token_ids": [5, 100_000, 6]},
            {"prompt": "fox", "model": gone},
            {"messages": [USER], "model": other},
            {"messages": [USER], "chat_template_kwargs": {"date": "soon"}},
            {"token_ids": [1], "model": gone},
            {"prompt": "fox"},
        )
        assert [one.prompt.line for one in found] == [1, 3, 9]
        assert [line for line, _ in faults] == [2, 4, 5, 6, 7, 8]
        reasons = dict(faults)
        size = len(load_tokenizer(model))
        assert reasons[2] == "the prompt has 65 tokens, the model's context is 64"
        assert reasons[4] == (
            f"token id 100000 (number 2) is not in the model's vocabulary of {size}"
        )
        assert "no model folder at '/no/such/model'" in reasons[5]
        assert "has no chat template" in reasons[6]
        assert 'must be such as "2026-07-31"' in reasons[7]
        assert reasons[8] == reasons[5]

    def test_they_join_those_of_the_reader(self, model: str) -> None:
        file = read({"prompt": "fox"}, {"token_ids": [1] * 100}, {"prompt": ""}, {"prompt": "x"})
        assert len(list(tokenize(file, model, faults=file.faults))) == 2
        with pytest.raises(InvalidPrompts) as caught:
            file.check()
        assert [line for line, _ in caught.value.faults] == [2, 3]

    def test_no_model_at_all(self, model: str) -> None:
        found, faults = run(None, {"prompt": "x"}, {"prompt": "x", "model": model})
        assert [one.prompt.line for one in found] == [2]
        assert faults == [(1, 'no model: name one in the line as "model", or for all with --model')]

    def test_a_bad_default_model_is_the_callers_fault(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="no model folder"):
            run("/no/such/model", {"prompt": "x"})
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(ModelNotFound, match="has no tokenizer"):
            run(str(tmp_path), {"prompt": "x"})

    def test_a_named_model_without_a_tokenizer_is_the_lines(
        self, model: str, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        _, faults = run(model, {"prompt": "x", "model": str(tmp_path)}, {"prompt": "x"})
        assert len(faults) == 1
        assert "has no tokenizer" in faults[0][1]

    def test_one_text_that_fails_spoils_no_other(self, model: str, tmp_path: Path) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        picky = Tokenizer(models.WordLevel({"fox": 0, "dog": 1}, unk_token="[UNK]"))
        folder = tinytext.save_model(tmp_path, PreTrainedTokenizerFast(tokenizer_object=picky))
        found, faults = run(
            str(folder), {"prompt": "fox"}, {"prompt": "cat"}, {"prompt": "dog"}, {"prompt": "fox"}
        )
        assert [one.ids.tolist() for one in found] == [[0], [1], [0]]
        assert len(faults) == 1
        assert faults[0][0] == 2
        assert "the model's tokenizer fails on this text" in faults[0][1]

    def test_a_prompt_without_tokens(self, other: str) -> None:
        _, faults = run(other, {"messages": [USER], "chat_template_kwargs": {"chat_template": ""}})
        assert faults == [(1, "the prompt gives no tokens")]

    def test_without_transformers_the_remedy_is_named(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingExtra, match=r"kvq\[producer\]"):
            run(model, {"prompt": "x"})
        assert len(run(model, {"token_ids": [1]})[0]) == 1
