from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ModelNotFound
from kvq.model import filedigest
from kvq.model.fingerprint import fingerprint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "rope_scaling": {"factor": 2.0, "kind": "linear"},
    "text_config": {"layers": 2, "transformers_version": "4.1"},
    "_name_or_path": "/somewhere",
    "transformers_version": "5.0",
}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"first shard" * 1000)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"second shard" * 1000)
    (folder / "tokenizer.json").write_text("{}")
    settle(folder)
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"num_layers": 4}))
    (folder / "adapters.safetensors").write_bytes(b"low rank")
    settle(folder)
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    read = filedigest._read_piece

    def spy(piece: Any) -> bytes:
        names.append(piece[0].path.name)
        return read(piece)

    monkeypatch.setattr(filedigest, "_read_piece", spy)
    return names


def settle(folder: Path) -> None:
    """Give every file an old time, as those of any real model have."""
    for path in folder.iterdir():
        os.utime(path, ns=(10**18 + 1, 10**18 + 1))


def config_change(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def flip(name: str, at: int) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(data)

    return apply


class TestWhatCounts:
    @pytest.mark.parametrize(
        "change",
        [
            flip("model-00001-of-00002.safetensors", 0),
            flip("model-00001-of-00002.safetensors", -1),
            flip("model-00002-of-00002.safetensors", 5000),
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            lambda folder: (folder / "model-extra.safetensors").write_bytes(b"more"),
            lambda folder: (folder / "hf_quant_config.json").write_text('{"bits": 4}'),
            config_change(lambda config: config.update(hidden_size=65)),
            config_change(lambda config: config.update(quantization={"bits": 4})),
            config_change(lambda config: config.pop("hidden_size")),
            config_change(lambda config: config["rope_scaling"].update(factor=4.0)),
            config_change(lambda config: config["text_config"].update(layers=3)),
        ],
    )
    def test_a_change_of_weights_or_config_changes_it(
        self, model: Path, change: Callable[[Path], object]
    ) -> None:
        before = fingerprint(model)
        change(model)
        assert fingerprint(model) != before

    @pytest.mark.parametrize(
        "change",
        [
            config_change(lambda config: config.update(_name_or_path="elsewhere")),
            config_change(lambda config: config.update(transformers_version="6")),
            config_change(lambda config: config["text_config"].pop("transformers_version")),
            config_change(lambda config: config.update(hidden_size=config.pop("hidden_size"))),
            lambda folder: (folder / "tokenizer.json").write_text('{"vocab": 1}'),
            lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
            lambda folder: (folder / "adapters.safetensors").write_bytes(b"not loaded"),
            lambda folder: (folder / "consolidated.safetensors").write_bytes(b"not loaded"),
            lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG, indent=2)),
        ],
    )
    def test_nothing_else_does(self, model: Path, change: Callable[[Path], object]) -> None:
        before = fingerprint(model)
        change(model)
        assert fingerprint(model) == before

    def test_a_copy_a_renamed_folder_and_links_are_equal(self, model: Path, tmp_path: Path) -> None:
        before = fingerprint(model)
        shutil.copytree(model, tmp_path / "copy")
        linked = tmp_path / "linked"
        linked.mkdir()
        for path in model.iterdir():
            (linked / path.name).symlink_to(path)
        assert fingerprint(tmp_path / "copy") == fingerprint(linked) == before
        model.rename(tmp_path / "renamed")
        assert fingerprint(str(tmp_path / "renamed")) == before

    def test_content_moved_across_shards_changes_it(self, model: Path) -> None:
        before = fingerprint(model)
        first, second = sorted(model.glob("model*.safetensors"))
        contents = first.read_bytes(), second.read_bytes()
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])
        swapped = fingerprint(model)
        first.write_bytes(contents[0] + contents[1])
        second.write_bytes(b"")
        assert len({before, swapped, fingerprint(model)}) == 3

    def test_the_adapter_counts(self, model: Path, adapter: Path) -> None:
        alone, adapted = fingerprint(model), fingerprint(model, adapter)
        assert adapted != alone
        (adapter / "adapter_config.json").write_text(json.dumps({"num_layers": 5}))
        reconfigured = fingerprint(model, str(adapter))
        flip("adapters.safetensors", 0)(adapter)
        assert len({alone, adapted, reconfigured, fingerprint(model, adapter)}) == 4

    def test_the_formula_is_the_documented_one(self, model: Path, adapter: Path) -> None:
        def h(*data: bytes) -> bytes:
            return blake2b(b"".join(data), digest_size=20).digest()

        def u64(value: int) -> bytes:
            return value.to_bytes(8, "little")

        def file(path: Path) -> bytes:
            data = path.read_bytes()
            return h(u64(len(data)), h(data))

        def part(name: bytes, data: bytes) -> bytes:
            return u64(len(name)) + name + u64(len(data)) + data

        config = (
            b'{"hidden_size":64,"model_type":"llama",'
            b'"rope_scaling":{"factor":2.0,"kind":"linear"},"text_config":{"layers":2}}'
        )
        weights = b"".join(file(path) for path in sorted(model.glob("model*.safetensors")))
        expected = h(
            b"kvq fingerprint 1",
            part(b"config", config),
            part(b"weights", weights),
            part(b"adapter config", b'{"num_layers":4}'),
            part(b"adapter", file(adapter / "adapters.safetensors")),
        )
        assert fingerprint(model, adapter) == expected.hex()

    def test_pieces_are_put_together_in_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(filedigest, "PIECE", 1000)
        data = os.urandom(3500)
        (tmp_path / "a").write_bytes(data)
        pieces = [blake2b(data[at : at + 1000], digest_size=20).digest() for at in (0, 1000, 2000)]
        pieces.append(blake2b(data[3000:], digest_size=20).digest())
        joined = (3500).to_bytes(8, "little") + b"".join(pieces)
        assert filedigest.file_digests([tmp_path / "a"]) == [
            blake2b(joined, digest_size=20).digest()
        ]


class TestMemory:
    def test_weights_are_read_once(self, model: Path, adapter: Path, reads: list[str]) -> None:
        first = fingerprint(model, adapter)
        assert sorted(reads) == [
            "adapters.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ]
        reads.clear()
        assert fingerprint(model, adapter) == first
        assert reads == []

    def test_only_the_changed_file_is_read_again(self, model: Path, reads: list[str]) -> None:
        fingerprint(model)
        flip("model-00002-of-00002.safetensors", 3)(model)
        reads.clear()
        fingerprint(model)
        assert reads == ["model-00002-of-00002.safetensors"]

    def test_a_change_that_keeps_size_and_time_is_seen(self, model: Path) -> None:
        before = fingerprint(model)
        flip("model-00001-of-00002.safetensors", 3)(model)
        settle(model)
        assert fingerprint(model) != before

    def test_a_file_of_this_very_moment_is_not_remembered(
        self, model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = (model / "model-00001-of-00002.safetensors").stat().st_mtime_ns
        monkeypatch.setattr(filedigest.time, "time_ns", lambda: written + 1_000_000)
        fingerprint(model)
        reads.clear()
        fingerprint(model)
        assert len(reads) == 2

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"not json",
            b"[]",
            b'{"version": 1, "files": 3}',
            b'{"version": 2, "files": {}}',
            b"\xff\xfe\x00",
        ],
    )
    def test_a_damaged_memory_is_written_anew(
        self, model: Path, cache_folder: Path, reads: list[str], content: bytes
    ) -> None:
        before = fingerprint(model)
        (cache_folder / "fingerprints.json").write_bytes(content)
        assert fingerprint(model) == before
        reads.clear()
        assert fingerprint(model) == before
        assert reads == []

    @pytest.mark.parametrize("digest", ["zz" * 20, "ab", 7, None])
    def test_a_damaged_entry_is_not_believed(
        self, model: Path, cache_folder: Path, digest: object
    ) -> None:
        before = fingerprint(model)
        memory = json.loads((cache_folder / "fingerprints.json").read_text())
        for entry in memory["files"].values():
            entry[-1] = digest
        (cache_folder / "fingerprints.json").write_text(json.dumps(memory))
        assert fingerprint(model) == before

    def test_it_need_not_be_writable(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = fingerprint(model)
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path / "file" / "below"))
        assert fingerprint(model) == before

    def test_writers_at_once_leave_a_whole_file(self, model: Path, cache_folder: Path) -> None:
        results: list[str] = []
        threads = [
            threading.Thread(target=lambda: results.append(fingerprint(model))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 8
        assert len(set(results)) == 1
        assert [path.name for path in cache_folder.iterdir()] == ["fingerprints.json"]
        assert len(json.loads((cache_folder / "fingerprints.json").read_text())["files"]) == 2

    def test_others_entries_are_kept_and_the_file_stays_small(
        self, model: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(filedigest, "_REMEMBERED", 3)
        cache_folder.mkdir()
        (cache_folder / "fingerprints.json").write_text(
            json.dumps({"version": 1, "files": {"/a": [], "/b": []}})
        )
        fingerprint(model)
        files = json.loads((cache_folder / "fingerprints.json").read_text())["files"]
        assert next(iter(files)) == "/b"
        assert len(files) == 3

    def test_where_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVQ_CACHE_DIR")
        monkeypatch.setenv("HOME", "/home/someone")
        monkeypatch.setattr(filedigest.sys, "platform", "linux")
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert filedigest.memory_path() == Path("/xdg/kvq/fingerprints.json")
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        assert filedigest.memory_path() == Path("/home/someone/.cache/kvq/fingerprints.json")
        monkeypatch.setattr(filedigest.sys, "platform", "darwin")
        assert filedigest.memory_path() == Path(
            "/home/someone/Library/Caches/kvq/fingerprints.json"
        )


class TestFaults:
    def test_what_is_missing_is_named(self, model: Path, adapter: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="no model folder"):
            fingerprint(tmp_path / "gone")
        (adapter / "adapters.safetensors").unlink()
        with pytest.raises(ModelNotFound, match=r"adapter .* has no adapters\.safetensors"):
            fingerprint(model, adapter)
        for path in model.glob("model*"):
            path.unlink()
        with pytest.raises(ModelNotFound, match=r"no model\*\.safetensors"):
            fingerprint(model)

    def test_a_dangling_link_is_named(self, model: Path, tmp_path: Path) -> None:
        (model / "model-00003.safetensors").symlink_to(tmp_path / "gone")
        with pytest.raises(ModelNotFound, match="cannot be read"):
            fingerprint(model)

    def test_a_file_that_changes_meanwhile_is_refused(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = filedigest._read_piece

        def grow(piece: Any) -> bytes:
            with piece[0].path.open("ab") as file:
                file.write(b"more")
            return read(piece)

        monkeypatch.setattr(filedigest, "_read_piece", grow)
        with pytest.raises(ModelNotFound, match="changed while it was read"):
            fingerprint(model)
