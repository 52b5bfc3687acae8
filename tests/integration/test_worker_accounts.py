"""What a worker says of its jobs: totals in Redis, and one line of log for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jobs_for_tests import job, submit
from workers import Fleet, WorkerProcess, eventually

from kvq.queue import keys, tally
from kvq.queue.connection import PatientRedis
from kvq.queue.results import State
from kvq.queue.tally import Total
from kvq.store.store import Store


def totals(client: PatientRedis) -> dict[tuple[str, ...], float]:
    return {(one.kind, *one.labels): one.value for one in tally.read(client, "kvq")}


def lines(worker: WorkerProcess) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in worker.output.splitlines()]


def test_every_end_of_a_job_is_counted_once(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    good = [job(n, 100) for n in range(5)]
    prefix = job(50, 64, name="")
    wrong, broken, dying = (
        job(n, model=name) for n, name in ((6, "wrong"), (7, "broken"), (8, "die"))
    )
    submit(client, [*good, wrong, broken], [prefix])
    assert fleet.start("--burst").wait(60) == 0
    submit(client, [dying])
    for _ in range(4):
        assert fleet.start(KVQ_LEASE="3", KVQ_HEARTBEAT="1").wait(60) == 9
        key = keys.registry("wip", "kvq")
        client.zadd(key, dict.fromkeys(client.zrange(key, 0, -1), 1))
    fleet.start()
    eventually(lambda: ("failed", "worker_died") in totals(client))
    assert totals(client) == {
        ("jobs", "fast", "raw"): 6,
        ("caches", "fast", "raw"): 5,
        ("tokens", "fast", "raw"): 564,
        ("prefilled_tokens", "fast", "raw"): 564,
        ("reused_tokens", "fast", "raw"): 0,
        ("bytes", "fast", "raw"): 6,
        ("bytes_written", "fast", "raw"): 6,
        ("prefill_seconds", "fast", "raw"): 0,
        ("seconds", "fast", "raw"): 0,
        ("failed", "unsupported_model"): 1,
        ("failed", "worker_failed"): 1,
        ("failed", "worker_died"): 1,
        ("retried",): 6,
    }


def test_a_worker_says_which_kvq_store_and_model_it_works_with(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    from importlib.metadata import version

    worker = fleet.ready(fleet.start())
    (key,) = client.smembers(keys.WORKERS)
    assert client.hmget(key, "kvq_version", "kvq_store", "kvq_model") == [
        version("kvq").encode(),
        store.id.encode(),
        None,
    ]
    submit(client, [job(1)])
    eventually(lambda: client.hget(key, "kvq_model") == b"fast")
    worker.kill()


def test_json_logs_have_one_line_a_job_and_nothing_of_its_prompt(
    fleet: Fleet, client: PatientRedis
) -> None:
    good, wrong = job(1, 100), job(2, model="wrong")
    batch = submit(client, [good, wrong])
    worker = fleet.start("--burst", KVQ_LOG_FORMAT="json")
    assert worker.wait(60) == 0
    stored, failed = (one for one in lines(worker) if "job" in one)
    assert {name: stored[name] for name in ("event", "level", "job", "custom_ids", "caches")} == {
        "event": "stored",
        "level": "info",
        "job": good.id,
        "custom_ids": ["prompt-1"],
        "caches": ["cache-1"],
    }
    assert (stored["tokens"], stored["reused_tokens"], stored["bytes_written"]) == (100, 0, 1)
    assert stored["seconds"] == 0
    assert (failed["event"], failed["level"], failed["job"]) == ("failed", "warning", wrong.id)
    assert (failed["code"], failed["reason"]) == ("unsupported_model", "this model is unknown")
    assert all(one["time"].endswith("+00:00") for one in lines(worker))
    assert good.message.encode()["tail"] not in worker.output
    assert batch.facts.id not in (None, "")


def test_text_logs_have_one_line_a_job(fleet: Fleet, client: PatientRedis) -> None:
    submit(client, [job(n, 100) for n in range(3)])
    worker = fleet.start("--burst")
    assert worker.wait(60) == 0
    about = [line for line in worker.output.splitlines() if "100 tokens for fast" in line]
    assert len(about) == 3
    assert "stored 100 tokens for fast: cache-0: 100 tokens, 0 of them reused, 1 B" in about[0]


def test_tracebacks_of_a_failing_machine_are_json_too(fleet: Fleet, client: PatientRedis) -> None:
    submit(client, [job(1, model="broken")])
    worker = fleet.start("--burst", KVQ_LOG_FORMAT="json")
    assert worker.wait(60) == 0
    errors = [one for one in lines(worker) if one["level"] == "error"]
    assert len(errors) == 4
    assert all("OSError: the machine failed" in one["message"] for one in errors)


def test_totals_that_are_none_are_left_out(client: PatientRedis) -> None:
    key = tally.key("kvq")
    client.hset(
        key,
        mapping={
            b"\xff": 1,
            "not json": 1,
            '"text"': 1,
            "[]": 1,
            "[1]": 1,
            '["jobs",2]': 1,
            '["jobs","m","raw"]': "many",
            '["failed","nan"]': "nan",
            '["failed","less"]': "-4",
            '["failed","good"]': "2",
            json.dumps(["failed", "x" * 999]): 3,
        },
    )
    assert sorted(tally.read(client, "kvq"), key=lambda one: one.value) == [
        Total(kind="failed", labels=("good",), value=2),
        Total(kind="failed", labels=("x" * 200,), value=3),
    ]


def test_something_else_in_the_place_of_the_totals_fails_no_job(
    fleet: Fleet, client: PatientRedis
) -> None:
    client.set(tally.key("kvq"), "x")
    batch = submit(client, [job(1)])
    assert fleet.start("--burst").wait(60) == 0
    assert [one.state for one in batch.results()] == [State.STORED]
