"""Whoever has the Redis password can break a prompt, but run nothing and stop nobody."""

from __future__ import annotations

import json
import pickle
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

from jobs_for_tests import job, submit
from workers import Fleet

from kvq.queue import keys
from kvq.queue.connection import PatientRedis
from kvq.queue.messages import JOB_FUNCTION
from kvq.queue.results import State
from kvq.store.store import Store


class Exploit:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (f"touch {self._mark}",)


def call(function: str, *arguments: Any, instance: Any = None, **named: Any) -> bytes:
    return json.dumps([function, instance, list(arguments), named]).encode()


def test_hostile_jobs_run_nothing_and_the_worker_goes_on(
    fleet: Fleet, client: PatientRedis, store: Store, tmp_path: Path
) -> None:
    mark = tmp_path / "exploited"
    touch = f"touch {mark}"
    exploit = pickle.dumps(("os.system", None, (touch,), {}))
    good = {"data": zlib.compress(call(JOB_FUNCTION, job(1).message.encode()))}
    hashes: dict[str, dict[str, Any]] = {
        "pickled": {"data": pickle.dumps(Exploit(mark))},
        "pickled-call": {"data": zlib.compress(exploit)},
        "system": {"data": call("os.system", touch)},
        "builtin": {"data": call("eval", f"open({str(mark)!r}, 'w')")},
        "method": {"data": call("system", touch, instance="os")},
        "neighbour": {"data": call("kvq_worker.jobs.os.system", touch)},
        "named": {"data": call(JOB_FUNCTION, message={}, extra=1)},
        "no-arguments": {"data": call(JOB_FUNCTION)},
        "not-a-message": {"data": call(JOB_FUNCTION, ["os.system", touch])},
        "not-json": {"data": b"\xff\xfe"},
        "not-a-call": {"data": b'{"a": 1}'},
        "deep": {"data": b"[" * 100_000},
        "bomb": {"data": zlib.compress(b"[" + b" " * 150_000_000 + b"]")},
        "no-data": {"origin": "kvq"},
        "callbacks": {
            **good,
            "success_callback_name": "os.abort",
            "failure_callback_name": "os.abort",
            "stopped_callback_name": "os.abort",
            "success_callback_timeout": "x",
        },
        "webhook": {
            **good,
            "webhooks": json.dumps([{"url": "http://127.0.0.1:1/", "job_status": "finished"}]),
        },
        "bad-fields": {
            **good,
            "created_at": "yesterday",
            "timeout": "-1",
            "result_ttl": "forever",
            "retries_left": "9999999999999999",
            "retry_intervals": "[3600]",
            "dependency_ids": '["../x", 1]',
            "origin": "../../other",
            "meta": exploit,
            "result": exploit,
            "exc_info": b"\xff",
            "description": "\x1b[2J\nforged log line",
            "enqueue_at_front": "maybe",
            "repeats_left": "5",
            "group_id": "g",
            "rate_limit_key": "k",
            "rate_limit_concurrency": "1",
        },
    }
    for name, fields in hashes.items():
        client.hset(keys.job(name), mapping={"status": "queued", "origin": "kvq", **fields})
    client.set(keys.job("not-a-hash"), "x")
    client.rpush(keys.queue("kvq"), *hashes, "not-a-hash", "missing", "../../etc", b"\xff\xfe")

    client.zadd(keys.registry("wip", "kvq"), {b"\xff": 0, "no-colon": 0, "a:b:c": 0, "x:y": 0})
    client.zadd(keys.registry("deferred", "kvq"), {b"\xff": 0, "nobody": 0})
    client.rpush(keys.intermediate("kvq"), b"\xff", "nobody", "not-a-hash")

    batch = submit(client, [job(1), job(2)])
    worker = fleet.start("--burst")
    assert worker.wait(120) == 0
    assert [one.state for one in batch.results()] == [State.STORED] * 2
    assert not mark.exists()
    assert client.zcard(keys.registry("wip", "kvq")) == 0
    assert client.lrange(keys.queue("kvq"), 0, -1) == []
    assert client.lrange(keys.intermediate("kvq"), 0, -1) == []
    assert "forged" not in worker.output.replace("?forged", "").split("[2J")[0]
    assert "\x1b[2J" not in worker.output
    # A message that is none fails once, with its reason, as any other prompt's own fault.
    stored = client.xrevrange(keys.results("not-a-message"), count=1)[0][1]
    returned = json.loads(b64decode(stored[b"return_value"]))
    assert (returned["status"], returned["code"]) == ("failed", "invalid_message")


def test_a_worker_makes_no_calls_for_a_job(fleet: Fleet, client: PatientRedis) -> None:
    import http.server
    import threading

    calls: list[str] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)

    listener = http.server.HTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    try:
        one = job(1)
        batch = submit(client, [one])
        hook = {"url": f"http://127.0.0.1:{listener.server_port}/", "job_status": "finished"}
        client.hset(keys.job(one.id), "webhooks", json.dumps([hook]))
        assert fleet.start("--burst").wait(60) == 0
        assert [one.state for one in batch.results()] == [State.STORED]
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
    assert calls == []
