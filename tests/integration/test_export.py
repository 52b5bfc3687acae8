"""`--export`: a stock mlx-lm file for each prompt, written by the worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import CommandLine, bodies, read_lines, write_lines
from servers import Server
from tinymodel import tiny_model

from kvq.stock import read_prompt_cache
from kvq.store import Store

SHARED = "You are a helpful assistant. " * 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "prompts.jsonl",
        {"custom_id": "a", "prompt": SHARED + "Hello"},
        {"custom_id": "b", "prompt": SHARED + "World", "name": "world"},
    )


def test_run_leaves_a_file_for_each_prompt(tmp_path: Path, model: Path, prompts: Path) -> None:
    kvq = CommandLine(tmp_path)
    results, files = tmp_path / "results.jsonl", tmp_path / "files"
    run = ("run", prompts, "-m", model, "-s", tmp_path / "store", "-o", results)

    # What is stored already still gets its file.
    first = kvq(*run)
    assert first.returncode == 0, first.stderr
    done = kvq(*run, "--export", files)
    assert done.returncode == 0, done.stderr
    found = bodies(results)
    assert {path.name for path in files.iterdir()} == {
        f"{one['name']}.safetensors" for one in found
    }
    for one in found:
        assert one["export"] == str(files)
        assert one["prefilled_tokens"] == 0
        cache = read_prompt_cache(files / f"{one['name']}.safetensors")
        assert cache.tokens == one["tokens"]
        assert cache.metadata["model"] == str(model)

    again = kvq(*run, "--export", files)
    assert again.returncode == 0
    assert "2 stored already, 0 jobs" in again.stderr
    assert [one["export"] for one in bodies(results)] == [str(files)] * 2
    (files / "world.safetensors").unlink()
    assert kvq(*run, "--export", files).returncode == 0
    assert (files / "world.safetensors").is_file()


def test_a_worker_writes_where_its_operator_lets_it(
    tmp_path: Path, model: Path, prompts: Path, server: Server
) -> None:
    kvq = CommandLine(tmp_path, KVQ_REDIS_URL=server.url)
    results, files = tmp_path / "results.jsonl", tmp_path / "files"
    Store.create(tmp_path / "store")
    submit = ("submit", prompts, "-m", model, "-s", tmp_path / "store")
    assert kvq(*submit, "--export", files).returncode == 0
    assert kvq("worker", "--burst").returncode == 0
    assert kvq("wait", "-o", results).returncode == 1
    for line in read_lines(results):
        assert line["error"]["code"] == "invalid_message"
        assert "set KVQ_EXPORT" in line["error"]["message"]
    assert not files.exists()

    files.mkdir()
    assert kvq(*submit, "--export", files / "today", "--again").returncode == 0
    assert kvq("worker", "--burst", KVQ_EXPORT=str(files)).returncode == 0
    assert kvq("wait", "-o", results).returncode == 0
    names = {one["name"] for one in bodies(results)}
    assert {path.stem for path in (files / "today").iterdir()} == names
