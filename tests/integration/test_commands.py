"""submit, wait, status, results, cancel and retry against a real server and worker processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from servers import Server
from tinymodel import tiny_model
from workers import Fleet

from kvq.queue import keys
from kvq.queue.connection import PatientRedis
from kvq.store.store import Store
from kvq_producer import cli

SHARED = "You are a helpful assistant. " * 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class Kvq:
    """The command in this process, with what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._capsys.readouterr()
        status = cli.run([str(one) for one in arguments])
        self.out, self.err = self._capsys.readouterr()
        return status

    def json(self, *arguments: object) -> dict[str, Any]:
        assert self(*arguments, "--json") == 0, self.err
        return dict(json.loads(self.out))

    def lines(self, *arguments: object) -> list[dict[str, Any]]:
        assert self(*arguments) in (0, 1), self.err
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def kvq(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
    tmp_path: Path,
) -> Kvq:
    monkeypatch.setenv("KVQ_REDIS_URL", server.url)
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Kvq(capsys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines: list[dict[str, Any]] = [
        {"custom_id": f"q{n}", "prompt": SHARED + f"Question {n}: hello world?"} for n in range(5)
    ]
    lines.append({"custom_id": "same", "prompt": SHARED + "Question 3: hello world?"})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_submit_work_and_results(
    kvq: Kvq, fleet: Fleet, client: PatientRedis, store: Store, model: Path, file: Path
) -> None:
    facts = kvq.json("submit", file, "--model", model, "--store", store.path)
    assert (facts["prompts"], facts["duplicates"], facts["prefix_jobs"]) == (6, 1, 1)
    assert facts["enqueued"] == 6
    assert client.llen(keys.queue("kvq")) == 1
    assert client.zcard(keys.registry("deferred", "kvq")) == 5
    (shared,) = client.scan_iter("kvq:ids:*")
    assert client.strlen(shared) >= 256 * 4
    waiting = kvq.lines("results")
    assert [one["error"]["code"] for one in waiting] == ["pending"] * 6

    assert kvq.json("submit", file, "--model", model, "--store", store.path)["enqueued"] == 0
    assert kvq.json("status")["deferred"] == 5

    fleet.start("--burst", KVQ_STORE="").wait(60)
    assert kvq("wait", facts["batch"]) == 0
    assert "q4" in kvq.out
    lines = kvq.lines("results", facts["batch"])
    assert [one["custom_id"] for one in lines] == ["q0", "q1", "q2", "q3", "q4", "same"]
    assert all(one["response"]["status_code"] == 200 for one in lines)
    assert lines[3]["response"]["body"]["name"] == lines[5]["response"]["body"]["name"]
    assert lines[0]["response"]["body"]["store"] == str(store.path)
    assert kvq.lines("results", "--failed") == []
    shown = kvq.json("status", facts["batch"])
    assert shown["states"]["stored"] == 6
    assert shown["done_tokens"] == shown["work_tokens"]
    assert kvq("status") == 0
    assert facts["batch"] in kvq.out


def test_finished_work_is_trusted_only_where_the_store_is_not_seen(
    kvq: Kvq, fleet: Fleet, model: Path, file: Path, store: Store, tmp_path: Path
) -> None:
    # Submitted without naming a store, so nobody here can look into it.
    facts = kvq.json("submit", file, "--model", model)
    assert fleet.start("--burst").wait(60) == 0
    again = kvq.json("submit", file, "--model", model)
    assert (again["enqueued"], again["done"]) == (0, facts["enqueued"])
    assert kvq("wait") == 0
    assert kvq.json("submit", file, "--model", model, "--again")["enqueued"] == facts["enqueued"]


def test_wait_fails_when_a_prompt_did_and_retry_runs_only_that(
    kvq: Kvq, fleet: Fleet, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        json.dumps({"custom_id": "short", "token_ids": [5] * 20}) + "\n"
        + json.dumps({"custom_id": "long", "token_ids": [5] * 400}) + "\n"
    )  # fmt: skip
    assert kvq("submit", file, "--model", model) == 0
    batch = kvq.out.strip()
    assert "2 enqueued" in kvq.err
    assert fleet.start("--burst", KVQ_MAX_TOKENS="100").wait(60) == 0
    output = tmp_path / "out.jsonl"
    assert kvq("wait", batch, "--output", output) == 1
    assert "kvq: long: failed: the prompt has 400 tokens" in kvq.err
    codes = [json.loads(line)["error"] for line in output.read_text().splitlines()]
    assert codes[0] is None
    assert codes[1]["code"] == "prompt_too_long"
    assert [one["custom_id"] for one in kvq.lines("results", "--failed")] == ["long"]

    assert kvq.json("retry", batch) == {
        "batch": batch, "again": 1, "pending": 0, "stored": 1, "lost": 0,
    }  # fmt: skip
    assert kvq("wait", batch, "--timeout", "0.3") == 3
    assert "1 prompts are not done yet" in kvq.err
    assert fleet.start("--burst").wait(60) == 0
    assert kvq("wait", batch) == 0


def test_cancel(kvq: Kvq, model: Path, file: Path, client: PatientRedis) -> None:
    batch = kvq.json("submit", file, "--model", model)["batch"]
    assert kvq("cancel", batch) == 0
    assert "6 dropped" in kvq.out
    assert client.llen(keys.queue("kvq")) == client.zcard(keys.registry("deferred", "kvq")) == 0
    assert kvq("wait", batch) == 1
    assert {one["error"]["code"] for one in kvq.lines("results", batch)} == {"canceled"}
    assert kvq.json("retry", batch)["lost"] == 6
    assert {one["error"]["code"] for one in kvq.lines("results", batch)} == {"canceled"}
    assert kvq.json("submit", file, "--model", model)["enqueued"] == 6


def test_faults_leave_the_queue_empty(
    kvq: Kvq, model: Path, tmp_path: Path, client: PatientRedis
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "x"}\nnot json\n{"prompt": "\xff"}\n{"prompt": 5}\n{}\n')
    assert kvq("submit", file, "--model", model) == 2
    for number in (2, 3, 4, 5):
        assert f"\n  line {number}: " in kvq.err
    assert client.keys("rq:*") == client.keys("kvq:*") == []
    facts = kvq.json("submit", file, "--model", model, "--skip-invalid")
    assert (facts["prompts"], facts["left_out"]) == (1, 4)


def test_submit_and_wait_in_one(
    kvq: Kvq, fleet: Fleet, model: Path, file: Path, tmp_path: Path
) -> None:
    worker = fleet.start()
    output = tmp_path / "out.jsonl"
    assert kvq("submit", file, "--model", model, "--wait", "--output", output) == 0
    assert len(output.read_text().splitlines()) == 6
    assert worker.alive
    workers = kvq.json("status")["workers"]
    assert [one["pid"] for one in workers] == [worker.pid]


def test_waiting_without_a_worker_says_so(kvq: Kvq, model: Path, file: Path) -> None:
    batch = kvq.json("submit", file, "--model", model)["batch"]
    assert kvq("wait", batch, "--timeout", "0.5") == 3
    assert "no worker listens on the queue 'kvq': start one with `kvq worker`" in kvq.err


def test_a_batch_that_is_not_known(kvq: Kvq) -> None:
    for command in ("wait", "results", "retry"):
        assert kvq(command) == 1
        assert "`kvq submit` makes one" in kvq.err
        assert kvq(command, "nonsense") == 1
        assert "no batch 'nonsense'" in kvq.err
    assert kvq("cancel", "nonsense") == 1


def test_a_server_that_is_not_there(
    kvq: Kvq, model: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQ_REDIS_URL", "redis://me:secret@127.0.0.1:1/0")
    for arguments in (["submit", file, "--model", model], ["status"], ["wait"]):
        assert kvq(*arguments) == 1
        assert "cannot be reached" in kvq.err
        assert "secret" not in kvq.err


def test_wait_outlives_a_restart_of_the_server(
    kvq: Kvq, fleet: Fleet, model: Path, file: Path, server: Server
) -> None:
    import threading
    import time

    batch = kvq.json("submit", file, "--model", model)["batch"]
    time.sleep(1.2)  # the server writes to disk every second

    def restart() -> None:
        time.sleep(1)
        server.kill()
        time.sleep(2)
        server.start()
        fleet.start("--burst")

    thread = threading.Thread(target=restart)
    thread.start()
    status = kvq("wait", batch)
    thread.join()
    assert status == 0, kvq.err


def test_submit_survives_a_lost_reply(
    kvq: Kvq, model: Path, file: Path, client: PatientRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvq.queue.enqueue import Enqueuer

    enqueue = Enqueuer.enqueue

    def twice(self: Enqueuer, *arguments: Any) -> list[str]:
        enqueue(self, *arguments)  # its reply was lost, so the connection sends it again
        return enqueue(self, *arguments)

    monkeypatch.setattr(Enqueuer, "enqueue", twice)
    assert kvq.json("submit", file, "--model", model)["under_way"] == 6
    assert client.llen(keys.queue("kvq")) == 1
    assert client.zcard(keys.registry("deferred", "kvq")) == 5


def test_submit_survives_a_server_that_restarts_without_its_data(
    kvq: Kvq,
    model: Path,
    tmp_path: Path,
    server: Server,
    client: PatientRedis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "prompts.jsonl"
    with file.open("w") as lines:
        for n in range(1200):
            lines.write(
                json.dumps({"custom_id": f"p{n}", "token_ids": [10 + n % 300, n // 300 + 5]})
            )
            lines.write("\n")
    from kvq.queue.enqueue import Enqueuer

    enqueue, calls = Enqueuer.enqueue, 0

    def crash_after_the_second(self: Enqueuer, *arguments: Any) -> list[str]:
        nonlocal calls
        words = enqueue(self, *arguments)
        calls += 1
        if calls == 2:
            server.kill()
            server.wipe()
            server.start()
        return words

    monkeypatch.setattr(Enqueuer, "enqueue", crash_after_the_second)
    batch = kvq.json("submit", file, "--model", model)["batch"]
    assert calls > 3
    assert kvq.json("status", batch)["states"]["pending"] == 1200
    queued = client.lrange(keys.queue("kvq"), 0, -1)
    assert len(queued) == len(set(queued)) == 1200


def test_a_batch_that_the_server_forgot_is_not_waited_for(
    kvq: Kvq, model: Path, file: Path, client: PatientRedis
) -> None:
    import threading
    import time

    batch = kvq.json("submit", file, "--model", model)["batch"]

    def forget() -> None:
        time.sleep(1)
        client.flushall()

    thread = threading.Thread(target=forget)
    thread.start()
    status = kvq("wait", batch)
    thread.join()
    assert status == 1


def test_worker_prints_what_makes_a_plain_rq_worker_the_same(
    kvq: Kvq, server: Server, tmp_path: Path
) -> None:
    assert kvq("worker", "--store", tmp_path, "--models", "a/*", "--print-environment") == 0
    printed = dict(line.removeprefix("export ").split("=", 1) for line in kvq.out.splitlines())
    assert printed["RQ_WORKER_CLASS"] == "kvq_worker.ResidentWorker"
    assert printed["RQ_JOB_CLASS"] == "kvq_worker.KvqJob"
    assert printed["RQ_CONNECTION_CLASS"] == "kvq.queue.connection.PatientRedis"
    assert printed["RQ_REDIS_URL"] == server.url
    assert printed["KVQ_STORE"] == str(tmp_path)
    assert printed["KVQ_MODELS"] == "'a/*'"


def test_priority_goes_before_what_waits(
    kvq: Kvq, model: Path, tmp_path: Path, client: PatientRedis
) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"custom_id": "usual", "token_ids": [5] * 20},
             {"custom_id": "urgent", "token_ids": [6] * 20, "priority": 5}]  # fmt: skip
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    kvq.json("submit", file, "--model", model)
    first, second = client.lrange(keys.queue("kvq"), 0, -1)
    described = [client.hget(keys.job(one.decode()), "description") for one in (first, second)]
    assert b"urgent" in described[0]
    assert b"usual" in described[1]
