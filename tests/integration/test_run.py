"""`kvq run` as a user runs it, with a real model, however small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tinymodel import tiny_model
from workers import eventually

from kvq.queue.connection import connect
from kvq.store.store import Store

SHARED = "You are a helpful assistant. " * 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class Kvq:
    """The command, with its state and store in a folder of the test's."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.store = folder, model, folder / "store"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "RQ_", "REDIS_"))}
        self.environment = {
            **kept,
            "KVQ_STATE": str(folder / "state"),
            "KVQ_CACHE_DIR": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "kvq_producer", *arguments]

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=240,
            cwd=self.folder,
        )

    def run(self, file: Path, *options: str) -> list[str]:
        return self.command(
            "run", str(file), "--model", str(self.model), "--store", str(self.store),
            "--output", str(self.folder / "results.jsonl"), "--codec", "raw", *options,
        )  # fmt: skip

    def finish(self, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.run(file, *options),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            cwd=self.folder,
        )

    def results(self) -> list[dict[str, Any]]:
        lines = (self.folder / "results.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def kvq(tmp_path: Path, model: Path) -> Kvq:
    return Kvq(tmp_path, model)


def prompts(folder: Path, *lines: dict[str, Any] | str) -> Path:
    file = folder / "prompts.jsonl"
    text = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    file.write_text("\n".join(text) + "\n")
    return file


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that work in the folder's state."""
    shown = subprocess.run(["ps", "-eww", "-o", "command="], capture_output=True, text=True).stdout
    return [line for line in shown.splitlines() if str(folder / "state") in line]


def body(line: dict[str, Any]) -> dict[str, Any]:
    return dict(line["response"]["body"])


def test_prompts_are_stored_once_and_a_second_run_prefills_nothing(
    kvq: Kvq, tmp_path: Path
) -> None:
    file = prompts(
        tmp_path,
        {"custom_id": "a", "prompt": SHARED + "What is the capital of France?"},
        {"custom_id": "b", "prompt": SHARED + "Who jumps over the lazy dog?", "name": "dog"},
        {"custom_id": "same as a", "prompt": SHARED + "What is the capital of France?"},
        {"custom_id": "chat", "messages": [{"role": "user", "content": "Hello " * 300}]},
    )
    first = kvq.finish(file)
    assert first.returncode == 0, first.stderr
    lines = kvq.results()
    assert [one["custom_id"] for one in lines] == ["a", "b", "same as a", "chat"]
    assert all(one["error"] is None for one in lines)
    assert body(lines[1])["name"] == "dog"
    assert body(lines[0])["name"] == body(lines[2])["name"]
    assert body(lines[1])["reused_tokens"] >= 256
    assert body(lines[0])["store"] == str(kvq.store)
    names = {manifest.name for manifest in Store(kvq.store).manifests()}
    assert names == {body(one)["name"] for one in lines}
    assert "dog" in first.stdout
    assert processes_of(tmp_path) == []

    second = kvq.finish(file)
    assert second.returncode == 0
    assert "4 stored already, 0 jobs" in second.stderr
    again = kvq.results()
    for old, new in zip(lines, again, strict=True):
        assert body(new)["reused_tokens"] == body(new)["tokens"] == body(old)["tokens"]
        assert body(new)["bytes"] == body(old)["bytes"]
        assert body(new)["name"] == body(old)["name"]


def test_a_store_that_was_removed_is_filled_again(kvq: Kvq, tmp_path: Path) -> None:
    file = prompts(tmp_path, {"custom_id": "a", "prompt": SHARED})
    assert kvq.finish(file).returncode == 0
    subprocess.run(["rm", "-r", str(kvq.store)], check=True)
    assert kvq.finish(file).returncode == 0
    assert body(kvq.results()[0])["prefilled_tokens"] > 0
    assert len(Store(kvq.store).names()) == 1


def test_faults_are_reported_with_their_lines_and_nothing_is_done(kvq: Kvq, tmp_path: Path) -> None:
    file = prompts(
        tmp_path,
        {"custom_id": "good", "prompt": "Hello world"},
        "not json",
        {"custom_id": "good", "prompt": "again"},
        {"custom_id": "long", "token_ids": [5] * 9000},
        {"prompt": ""},
    )
    done = kvq.finish(file)
    assert done.returncode == 2
    for number in (2, 3, 4, 5):
        assert f"line {number}: " in done.stderr
    assert "\n  line 1: " not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results.jsonl").exists()
    assert not (kvq.store / "spaces").exists()

    skipped = kvq.finish(file, "--skip-invalid")
    assert skipped.returncode == 0, skipped.stderr
    assert [one["custom_id"] for one in kvq.results()] == ["good"]
    assert "left out 4 lines" in skipped.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_in_any_way_it_leaves_no_process_and_goes_on_when_run_again(
    kvq: Kvq, tmp_path: Path, number: signal.Signals
) -> None:
    file = prompts(
        tmp_path,
        *({"custom_id": f"p{n}", "token_ids": [5 + n] * 2500} for n in range(8)),
    )
    process = subprocess.Popen(
        kvq.run(file),
        env=kvq.environment,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # A shell lets what it starts in the background ignore it, and so would all that starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    eventually(lambda: len(list(kvq.store.glob("caches/*.json"))) >= 2, 120)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode in (130, -signal.SIGKILL)
    if number is not signal.SIGKILL:
        assert "run the same command again to continue" in said
        assert "Traceback" not in said
        assert processes_of(tmp_path) == []
    eventually(lambda: processes_of(tmp_path) == [], 30)
    before = len(Store(kvq.store).names())
    assert 2 <= before < 8
    assert not (tmp_path / "results.jsonl").exists()
    again = kvq.finish(file)
    assert again.returncode == 0, again.stderr
    assert f"{before} stored already" in again.stderr
    assert len(kvq.results()) == len(Store(kvq.store).names()) == 8


def test_a_killed_worker_is_replaced_and_its_blocks_are_used(kvq: Kvq, tmp_path: Path) -> None:
    file = prompts(tmp_path, {"custom_id": "long", "token_ids": [7] * 6000})
    environment = {**kvq.environment, "KVQ_STEP": "256"}
    process = subprocess.Popen(
        kvq.run(file), env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    eventually(lambda: len(list(kvq.store.glob("spaces/*/nodes/*/*/*"))) >= 3, 120)
    shown = subprocess.run(
        ["ps", "-eww", "-o", "pid=,ppid=,command="], capture_output=True, text=True
    )
    (worker,) = (
        int(line.split()[0])
        for line in shown.stdout.splitlines()
        if line.split()[1] == str(process.pid) and "rq.cli" in line
    )
    os.kill(worker, signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    facts = body(kvq.results()[0])
    assert facts["tokens"] == 6000
    assert facts["reused_tokens"] >= 256


def test_a_killed_server_is_replaced(kvq: Kvq, tmp_path: Path) -> None:
    file = prompts(tmp_path, *({"token_ids": [5 + n] * 2500} for n in range(6)))
    process = subprocess.Popen(
        kvq.run(file), env=kvq.environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    eventually(lambda: list(kvq.store.glob("caches/*.json")), 120)
    (url,) = (tmp_path / "state").glob("run/*/server.url")
    os.kill(connect(url.read_text()).info("server")["process_id"], signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert [one["error"] for one in kvq.results()] == [None] * 6
    assert len(Store(kvq.store).names()) == 6
    assert processes_of(tmp_path) == []


def test_a_prompt_that_fails_is_named_and_the_status_says_so(kvq: Kvq, tmp_path: Path) -> None:
    file = prompts(
        tmp_path,
        {"custom_id": "fine", "token_ids": [5] * 300},
        {"custom_id": "too much", "token_ids": [6] * 600},
    )
    done = subprocess.run(
        kvq.run(file),
        env={**kvq.environment, "KVQ_MAX_TOKENS": "500"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert "kvq: too much: failed: the prompt has 600 tokens, this worker takes 500" in done.stderr
    lines = kvq.results()
    assert lines[0]["error"] is None
    assert lines[1]["response"] is None
    assert lines[1]["error"]["code"] == "prompt_too_long"


def test_two_runs_of_one_store_do_not_meet(kvq: Kvq, tmp_path: Path) -> None:
    file = prompts(tmp_path, *({"token_ids": [5 + n] * 2500} for n in range(8)))
    first = subprocess.Popen(kvq.run(file), env=kvq.environment, stderr=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, cwd=tmp_path)  # fmt: skip
    try:
        eventually(lambda: list(kvq.store.glob("caches/*.json")), 120)
        second = kvq.finish(file)
        assert second.returncode == 2
        assert f"another `kvq run` (process {first.pid})" in second.stderr
    finally:
        first.terminate()
        first.wait(60)


def test_a_full_disk_ends_the_run_with_its_reason(kvq: Kvq, tmp_path: Path) -> None:
    file = prompts(tmp_path, {"token_ids": [5] * 300})
    began = time.monotonic()
    done = subprocess.run(
        kvq.run(file),
        env={**kvq.environment, "KVQ_MIN_FREE": "9000T"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    assert "less than KVQ_MIN_FREE" in done.stderr
    assert "Traceback" not in done.stderr
