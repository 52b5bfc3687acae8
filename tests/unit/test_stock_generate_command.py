"""`mlx_lm.generate --prompt-cache-file` goes on from a file that kvq wrote."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from fixtures.stock_scenarios import VOCABULARY, feed, scenario
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvq.stock import write_prompt_cache

PREFIX, SUFFIX = "w5 w31 w2 w17 w44 w8 w23", "w40 w11"
_TEMPLATE = "{% for m in messages %}{{ 'w1 ' + m['content'] + ' w2' }}{% endfor %}"


@pytest.fixture(params=["plain", "chat"])
def model_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A tiny model with a tokenizer of one word a token, with or without a chat template."""
    case = scenario("quantized")
    model = case.build()
    folder = tmp_path / "model"
    folder.mkdir()
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {key: value for key, value in vars(model.args).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0"}
    if request.param == "chat":
        settings["chat_template"] = _TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", "--max-tokens", "8", *words])
    capsys.readouterr()
    # `mlx_lm.generate` is also the name of a function.
    importlib.import_module("mlx_lm.generate").main()
    return capsys.readouterr().out


@pytest.mark.parametrize("bits", [None, 8])
def test_the_text_is_that_of_the_whole_prompt(
    bits: int | None,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, tokenizer = mlx_lm.load(str(model_folder))
    text = PREFIX
    if tokenizer.has_chat_template:
        messages = [{"role": "user", "content": PREFIX}]
        # Like mlx_lm.cache_prompt: up to the end of what the user has said so far.
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, continue_final_message=True
        ).strip()
    ids = tokenizer.encode(text, add_special_tokens=False)
    cache = make_prompt_cache(model)
    if bits is not None:
        cache = [QuantizedKVCache(group_size=32, bits=bits) for _ in cache]
    feed(model, ids, cache)
    path = write_prompt_cache(
        model_folder.parent / "prompt",
        cache,
        {"model": str(model_folder), "tokenizer_config": {}, "source": {"pages": [1, 2]}},
        token_ids=ids,
    )
    quantized = ["--kv-group-size", "32"]
    resumed = run(
        monkeypatch, capsys, "--prompt-cache-file", str(path), "--prompt", f" {SUFFIX}", *quantized
    )
    if bits is not None:
        quantized += ["--kv-bits", "8", "--quantized-kv-start", "0"]
    whole = run(
        monkeypatch,
        capsys,
        "--model",
        str(model_folder),
        "--prompt",
        f"{PREFIX} {SUFFIX}",
        *quantized,
    )
    assert resumed.split("==========")[1] == whole.split("==========")[1]
    assert len(resumed.split("==========")[1].split()) == 8
