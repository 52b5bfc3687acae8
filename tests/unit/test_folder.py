from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from kvq.errors import ModelNotFound
from kvq.model.folder import ModelFacts, read_facts, resolve

RESPONSE: Any = SimpleNamespace(headers={}, request=None)


class ForeignHTTPError(Exception):
    """Stands for what the hub client's HTTP library raises."""


def make_model(folder: Path, *, weights: bool = True, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if weights:
        (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def no_download(*args: object, **kwargs: object) -> str:
    raise AssertionError("nothing may be downloaded")


class TestResolve:
    def test_a_local_folder_is_taken_as_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", no_download)
        make_model(tmp_path / "org" / "model")
        assert resolve(str(tmp_path / "org" / "model")) == tmp_path / "org" / "model"
        monkeypatch.chdir(tmp_path)
        assert resolve("org/model") == Path("org/model")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve("~/org/model") == tmp_path / "org" / "model"

    def test_a_folder_without_weights_serves_only_those_who_need_none(self, tmp_path: Path) -> None:
        make_model(tmp_path, weights=False)
        assert resolve(str(tmp_path), weights=False) == tmp_path
        with pytest.raises(ModelNotFound, match=r"no model\*\.safetensors: download its weights"):
            resolve(str(tmp_path))

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("/no/such/folder", "no model folder at '/no/such/folder': check the path"),
            ("./gone", "no model folder at './gone'"),
            ("", "give a local folder or a hub id"),
            ("a\0b", "give a local folder or a hub id"),
            ("a/b/c", "no model folder at 'a/b/c'"),
        ],
    )
    def test_what_can_be_no_hub_id_is_not_asked_for(
        self, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", no_download)
        with pytest.raises(ModelNotFound) as caught:
            resolve(name)
        assert reason in str(caught.value)

    def test_a_file_or_a_bare_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(b"x")
        with pytest.raises(ModelNotFound, match="is a file: give the folder"):
            resolve(str(tmp_path / "model.gguf"))
        with pytest.raises(ModelNotFound, match=r"has no config\.json"):
            resolve(str(tmp_path))

    def test_a_hub_id_is_fetched_with_or_without_weights(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_model(tmp_path)
        asked: list[tuple[str, list[str], bool]] = []

        def download(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
            asked.append((name, allow_patterns, local_files_only))
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert resolve("org/name") == tmp_path
        assert resolve("org/name", weights=False) == tmp_path
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        resolve("gpt2")
        assert [(name, offline) for name, _, offline in asked] == [
            ("org/name", False),
            ("org/name", False),
            ("gpt2", True),
        ]
        assert "model*.safetensors" in asked[0][1]
        assert not any("safetensors" in pattern for pattern in asked[1][1])
        assert not any(pattern.endswith(".py") for _, patterns, _ in asked for pattern in patterns)

    def test_a_cached_copy_without_weights_is_not_taken_for_a_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_model(tmp_path, weights=False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
        with pytest.raises(ModelNotFound, match="download its weights"):
            resolve("org/name")

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (hub_errors.LocalEntryNotFoundError("x"), "the hub cannot be reached"),
            (hub_errors.HFValidationError("bad id"), "the download failed (bad id)"),
            (ForeignHTTPError("refused"), "the download failed (refused)"),
            (OSError(28, "No space left on device"), "No space left on device"),
            (
                hub_errors.RepositoryNotFoundError("404", response=RESPONSE),
                "check the spelling",
            ),
            (
                hub_errors.GatedRepoError("403", response=RESPONSE),
                "ask for access",
            ),
        ],
    )
    def test_every_failure_of_the_hub_says_what_to_do(
        self, error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def download(*args: object, **kwargs: object) -> str:
            raise error

        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(ModelNotFound) as caught:
            resolve("org/name")
        assert reason in str(caught.value)
        assert "or give a local folder" in str(caught.value)
        assert caught.value.__cause__ is error

    def test_offline_really_asks_no_hub(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE forbids a download"):
            resolve("kvq-tests/never-published")


class TestFacts:
    @pytest.mark.parametrize(
        ("config", "context", "vocabulary"),
        [
            ({"max_position_embeddings": 4096, "vocab_size": 100}, 4096, 100),
            ({"n_positions": 1024, "vocab_size": 50257}, 1024, 50257),
            ({"max_seq_len": 2048}, 2048, None),
            ({"seq_length": 8192}, 8192, None),
            ({"text_config": {"max_position_embeddings": 512, "vocab_size": 7}}, 512, 7),
            ({"n_positions": 10**30}, None, None),
            ({"max_position_embeddings": -1, "vocab_size": True}, None, None),
            ({"max_position_embeddings": "many"}, None, None),
            ({}, None, None),
            (
                {
                    "max_position_embeddings": 32768,
                    "rope_scaling": {
                        "rope_type": "yarn",
                        "factor": 4.0,
                        "original_max_position_embeddings": 32768,
                    },
                },
                131072,
                None,
            ),
            (
                {
                    "max_position_embeddings": 131072,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                },
                131072,
                None,
            ),
            (
                {
                    "max_position_embeddings": 131072,
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": 8.0,
                        "original_max_position_embeddings": 8192,
                    },
                },
                131072,
                None,
            ),
        ],
    )
    def test_context_and_vocabulary(
        self, tmp_path: Path, config: dict[str, Any], context: int | None, vocabulary: int | None
    ) -> None:
        make_model(tmp_path, **config)
        assert read_facts(tmp_path) == ModelFacts(
            model_type="llama", context_tokens=context, vocab_size=vocabulary
        )

    @pytest.mark.parametrize(("limit", "context"), [(2048, 2048), (10**30, None), ("x", None)])
    def test_the_tokenizers_limit_is_asked_last(
        self, tmp_path: Path, limit: object, context: int | None
    ) -> None:
        make_model(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
        assert read_facts(tmp_path).context_tokens == context
        make_model(tmp_path, max_position_embeddings=64)
        assert read_facts(tmp_path).context_tokens == 64

    @pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
    def test_a_broken_config_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelNotFound, match=r"config\.json .*copy the model again"):
            read_facts(tmp_path)

    def test_a_missing_config_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"has no config\.json"):
            read_facts(tmp_path)
