"""The real demo model: its tokenizer's ids, and that mlx-lm loads it and it speaks sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvq_producer.demo import prepare
from kvq_producer.demo.folder import STAMP

pytestmark = pytest.mark.model

TEXT = "The quick brown fox, in 1984: hello\n  world! été 北京"
IDS = [2, 818, 3823, 8864, 37423, 236764, 528, 236743, 236770, 236819, 236828, 236812, 236787]
IDS += [29104, 107, 138, 12392, 236888, 10267, 169418]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model, local_files_only=True)


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> tuple[Any, Any]:
    mlx_lm = pytest.importorskip("mlx_lm")
    model, wrapped = mlx_lm.load(str(demo_model))
    return model, wrapped


def test_the_tokenizer_gives_the_known_ids(tokenizer: Any) -> None:
    assert tokenizer.encode(TEXT) == IDS
    assert tokenizer.encode(TEXT, add_special_tokens=False) == IDS[1:]
    assert tokenizer.decode(IDS[1:]) == TEXT


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\n\n", "  leading", "trailing ", "\t\ttab\r\n", "naïve café 🙂 \x00", "x" * 99],
)
def test_decoding_gives_back_every_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 2
    assert tokenizer.decode(ids[1:]) == text


def test_control_tokens_are_one_id_each(tokenizer: Any) -> None:
    assert tokenizer.encode("<bos><eos><unused0>", add_special_tokens=False) == [2, 1, 6]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)


def test_there_is_no_chat_template(tokenizer: Any) -> None:
    assert tokenizer.chat_template is None


def test_mlx_lm_loads_its_layers_in_the_stated_type(
    demo_model: Path, loaded: tuple[Any, Any]
) -> None:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    model, wrapped = loaded
    config = json.loads((demo_model / "config.json").read_text())
    kinds = [type(cache) for cache in model.make_cache()]

    assert str(model.model.embed_tokens.weight.dtype) == f"mlx.core.{config['dtype']}"
    assert kinds == ([RotatingKVCache] * 5 + [KVCache]) * 3
    assert wrapped.eos_token_ids == {1}


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("1, 2, 3, 4, 5,", " 6, 7, 8"),
        ("The capital of France is Paris. The capital of Italy is", " Rome."),
        ("The days of the week are Monday, Tuesday,", " Wednesday, Thursday, Friday"),
    ],
)
def test_it_goes_on_with_a_text_sensibly(loaded: tuple[Any, Any], prompt: str, start: str) -> None:
    from mlx_lm import generate

    assert generate(*loaded, prompt, max_tokens=8).startswith(start)


def test_the_terms_are_beside_the_weights(demo_model: Path) -> None:
    assert "Gemma" in (demo_model / "GEMMA_TERMS.html").read_text(encoding="utf-8")
    assert (demo_model / "NOTICE.md").is_file()


def test_preparing_it_again_does_nothing(demo_model: Path) -> None:
    dtype = json.loads((demo_model / STAMP).read_text())["made_from"]["dtype"]
    before = (demo_model / "model.safetensors").stat().st_mtime_ns

    prepare(demo_model, dtype, say=lambda line: pytest.fail(line))

    assert (demo_model / "model.safetensors").stat().st_mtime_ns == before
