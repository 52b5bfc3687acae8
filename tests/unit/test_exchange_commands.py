"""`kvq export` and `kvq import`, as they are typed."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from click.testing import CliRunner, Result
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from tinymodel import tiny_model

from kvq.errors import KvqError
from kvq.exchange.texts import ids_of_text
from kvq.model.tokenizer import encode_text, load_tokenizer
from kvq.stock import read_prompt_cache
from kvq.store import Store
from kvq_producer.cli import cli

TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def file(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mlx-lm itself writes of TEXT, without a chat template."""
    loaded, tokenizer = mlx_lm.load(str(model))
    ids = encode_text(tokenizer, TEXT)
    cache = make_prompt_cache(loaded)
    loaded(mx.array(ids)[None], cache=cache)
    path = tmp_path_factory.mktemp("stock") / "fox.safetensors"
    save_prompt_cache(str(path), cache, {"model": str(model), "tokenizer_config": "{}"})
    return path


def kvq(*arguments: object) -> Result:
    return CliRunner(catch_exceptions=True).invoke(cli, [str(one) for one in arguments])


@pytest.fixture
def imported(file: Path, model: Path, tmp_path: Path) -> tuple[Path, dict]:
    store = tmp_path / "store"
    done = kvq("import", file, "--model", model, "--store", store, "--create-store",
               "--codec", "raw", "--prompt", TEXT, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    return store, json.loads(done.stdout)


def test_a_file_and_its_text_become_a_cache(imported: tuple[Path, dict]) -> None:
    store, facts = imported
    manifest = Store(store).manifest(facts["name"])
    assert facts["name"].startswith("fox-")
    assert facts["tokens"] == manifest.tokens > 100
    assert facts["codec"] == "raw"


def test_its_default_name_is_that_of_a_submitted_prompt(
    imported: tuple[Path, dict], model: Path, tmp_path: Path
) -> None:
    store, _ = imported
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"custom_id": "fox", "prompt": TEXT}) + "\n")
    done = kvq("plan", prompts, "--model", model, "--store", store, "--codec", "raw", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["already_stored"] == 1


def test_text_resumes_from_it(imported: tuple[Path, dict], model: Path) -> None:
    store, facts = imported
    arguments = ("generate", "--model", model, "--prompt", TEXT + " And", "--json", "-n", 6)
    warm = json.loads(kvq(*arguments, "--store", store).stdout)
    cold = json.loads(kvq(*arguments).stdout)
    assert warm["reused_tokens"] >= facts["tokens"] - 2
    assert warm["text"] == cold["text"]


def test_a_prompt_is_generated_from_in_any_form(model: Path, tmp_path: Path) -> None:
    listed, text = tmp_path / "ids.json", tmp_path / "text.txt"
    listed.write_text(json.dumps(encode_text(load_tokenizer(model), TEXT).tolist()))
    text.write_text(TEXT)
    arguments = ("generate", "--model", model, "--json", "-n", 4)
    forms = (("--prompt", TEXT), ("--prompt-file", text), ("--token-ids", listed))
    facts = [json.loads(kvq(*arguments, *form).stdout) for form in forms]
    assert len({(one["text"], one["prompt_tokens"]) for one in facts}) == 1


def test_what_is_exported_comes_back_without_any_ids(
    imported: tuple[Path, dict], model: Path, tmp_path: Path
) -> None:
    store, facts = imported
    out = tmp_path / "out.safetensors"
    done = kvq("export", facts["name"], out, "--store", store, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tokens"] == facts["tokens"]
    found = read_prompt_cache(out)
    assert found.metadata["model"] == str(model)
    again = kvq("import", out, "-m", model, "-s", store, "--codec", "raw", "--name", "back")
    assert again.exit_code == 0, again.output
    assert "back: " in again.stdout
    assert Store(store).manifest("back").chain == Store(store).manifest(facts["name"]).chain


def test_mlx_lm_generates_from_an_exported_file(
    imported: tuple[Path, dict],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, facts = imported
    out = tmp_path / "out.safetensors"
    assert kvq("export", facts["name"], out, "--store", store).exit_code == 0

    def run(*words: str) -> str:
        arguments = ["mlx_lm.generate", "--max-tokens", "8", "--ignore-chat-template", *words]
        monkeypatch.setattr(sys, "argv", arguments)
        capsys.readouterr()
        import_module("mlx_lm.generate").main()
        return capsys.readouterr().out.split("==========")[1]

    suffix = "Hello world"
    resumed = run("--prompt-cache-file", str(out), "--prompt", suffix)
    assert resumed == run("--model", str(model), "--prompt", TEXT + suffix)


def test_token_ids_come_from_a_file(file: Path, model: Path, tmp_path: Path) -> None:
    ids = encode_text(mlx_lm.load(str(model))[1], TEXT).tolist()
    listed = tmp_path / "ids.json"
    arguments = ("import", file, "-m", model, "-s", tmp_path / "store", "--create-store",
                 "--token-ids", listed, "--name", "it")  # fmt: skip
    for content in (json.dumps(ids), json.dumps({"token_ids": ids})):
        listed.write_text(content)
        assert kvq(*arguments).exit_code == 0
    for content in ("[1, 2", '["a"]', "{}", "[1.5]", "[[1]]", f"[{2**40}]"):
        listed.write_text(content)
        done = kvq(*arguments)
        assert isinstance(done.exception, KvqError)
        assert "--token-ids is not a JSON list" in str(done.exception)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "give --prompt with the text that was cached, or --token-ids"),
        (("--prompt", TEXT + " more"), "but the text has"),
        (("--prompt", TEXT, "--name", "no/good"), "the character '/'"),
        (("--prompt", TEXT, "--codec", "q8", "--store", "nowhere"), "is not a kvq store"),
    ],
)
def test_what_cannot_be_is_said(
    file: Path, model: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    Store.create(tmp_path / "store")
    done = kvq("import", file, "-m", model, "-s", tmp_path / "store", *options)
    assert isinstance(done.exception, KvqError)
    assert said in str(done.exception)
    assert Store(tmp_path / "store").names() == []


def test_a_text_is_read_as_mlx_lm_reads_it(model: Path) -> None:
    tokenizer = mlx_lm.load(str(model))[1]
    plain = encode_text(tokenizer, TEXT)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXT}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert len(chat) > len(plain)
    assert ids_of_text(tokenizer, TEXT, len(plain)).tolist() == plain.tolist()
    assert ids_of_text(tokenizer, TEXT, len(chat)).tolist() == chat
    assert ids_of_text(tokenizer, TEXT, None).tolist() == chat
