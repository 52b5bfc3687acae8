"""`kvq doctor` against real servers: faults planted one by one, each found under its name."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server

from kvq.queue.connection import PatientRedis
from kvq.store.store import Store
from kvq_producer.cli import run
from kvq_producer.doctor import checks, rights
from kvq_producer.doctor.finding import State
from kvq_producer.doctor.machine import Given, Machine, Role


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("KVQ_", "RQ_", "REDIS_")):
            monkeypatch.delenv(name)


class Patient:
    """A worker's machine on which all is well, until something is planted."""

    def __init__(
        self, server: Server, client: PatientRedis, store: Store, folder: Path, patch: Any
    ) -> None:
        self.server, self.client, self.store = server, client, store
        self.folder, self.patch = folder, patch
        self.url = server.url

    def examined(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
        given = ["--role", "worker", "--redis-url", self.url, "--store", str(self.store.path)]
        status = run(["doctor", "--json", *given])
        facts = json.loads(capsys.readouterr().out)
        return status, {one["check"]: one for one in facts["findings"]}

    def program(self, name: str, says: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
        path.chmod(0o755)
        self.patch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")


@pytest.fixture
def patient(
    server: Server,
    client: PatientRedis,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Patient]:
    # MLX is examined in a process of its own, which has a test elsewhere.
    monkeypatch.setattr(checks, "CHECKS", tuple(one for one in checks.CHECKS if one.name != "mlx"))
    monkeypatch.setenv("KVQ_MODELS", "mlx-community/*")
    return Patient(server, client, store, tmp_path, monkeypatch)  # type: ignore[return-value]


def test_a_sound_machine_has_nothing_broken(
    patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = patient.examined(capsys)
    assert status == 0
    wrong = {name: one for name, one in found.items() if one["state"] in ("warning", "broken")}
    assert wrong == {}
    assert found["redis-rights"]["message"] == "the Redis user may do all that a worker does"


def gone(one: Patient) -> None:
    one.server.kill()


def wrong_password(one: Patient) -> None:
    one.client.config_set("requirepass", "secret")
    one.url = one.url.replace("redis://", "redis://:guess@")


def no_persistence(one: Patient) -> None:
    one.client.config_set("appendonly", "no")


def evicting(one: Patient) -> None:
    one.client.config_set("maxmemory", "100mb")
    one.client.config_set("maxmemory-policy", "volatile-lru")


def poor_rights(one: Patient) -> None:
    one.client.acl_setuser(
        "w", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"],
        commands=["-blmove"],
    )  # fmt: skip
    one.url = one.url.replace("redis://", "redis://w:pw@")


def wrong_clock(one: Patient) -> None:
    init = Machine.__init__

    def shifted(self: Machine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{"clock": lambda: time.time() + 7200, **kwargs})

    one.patch.setattr(Machine, "__init__", shifted)


def newer_format(one: Patient) -> None:
    (one.store.path / "kvq-store.json").write_text('{"format": 2, "block": 256, "id": "x"}')


def another_store(one: Patient) -> None:
    one.client.sadd("rq:workers:kvq", "rq:worker:w1")
    one.client.hset("rq:worker:w1", mapping={"state": "idle", "kvq_store": "f" * 16})


def not_mounted(one: Patient) -> None:
    table = one.folder / "fstab"
    table.write_text(f"nas:/kv {one.store.path} nfs hard 0 0\n")
    init = Machine.__init__

    def other(self: Machine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{"fstab": table, **kwargs})

    one.patch.setattr(Machine, "__init__", other)


def read_only(one: Patient) -> None:
    import tempfile

    real = tempfile.mkstemp

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if Path(kwargs["dir"]) == one.store.path:
            raise OSError(30, "Read-only file system")
        return real(*args, **kwargs)

    one.patch.setattr("kvq_producer.doctor.folder.tempfile.mkstemp", refuse)


def no_room(one: Patient) -> None:
    one.patch.setenv("KVQ_MIN_FREE", "9000TB")


def failing_fsync(one: Patient) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    one.patch.setattr("kvq_producer.doctor.behaviour.os.fsync", refuse)


def wrong_package(one: Patient) -> None:
    real = Machine.installed
    one.patch.setattr(
        Machine, "installed", lambda self, name: "2.6.1" if name == "rq" else real(self, name)
    )


def foreign_worker_class(one: Patient) -> None:
    one.patch.setenv("RQ_WORKER_CLASS", "rq.worker.Worker")


def sleeping_mac(one: Patient) -> None:
    one.program("pmset", " sleep  10")
    one.program("sysctl", "0")
    one.patch.setattr("kvq_producer.doctor.machine.sys.platform", "darwin")


PLANTED: list[tuple[Callable[[Patient], None], str, str]] = [
    (gone, "redis", "cannot be reached"),
    (wrong_password, "redis", "refused the login"),
    (no_persistence, "redis-persistence", "loses all queued jobs"),
    (evicting, "redis-eviction", "volatile-lru"),
    (poor_rights, "redis-rights", "BLMOVE rq:queue:kvq"),
    (wrong_clock, "redis-clock", "2 h 00 m ahead of Redis'"),
    (newer_format, "store", "format 2"),
    (another_store, "store-identity", "another store is mounted"),
    (not_mounted, "store-mount", "nothing is mounted at"),
    (read_only, "store-access", "Read-only file system"),
    (no_room, "store-space", "less than KVQ_MIN_FREE"),
    (failing_fsync, "store-fsync", "Input/output error"),
    (wrong_package, "packages", "rq 2.6.1 is not"),
    (foreign_worker_class, "rq-variables", "rq.worker.Worker"),
    (sleeping_mac, "sleep", "sleep 10"),
]


@pytest.mark.parametrize(
    ("plant", "check", "words"), PLANTED, ids=lambda one: getattr(one, "__name__", None)
)
def test_a_planted_fault_is_named(
    patient: Patient,
    plant: Callable[[Patient], None],
    check: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(patient)
    status, found = patient.examined(capsys)
    assert words in found[check]["message"]
    assert found[check]["mend"]
    mild = plant is sleeping_mac
    assert found[check]["state"] == ("warning" if mild else "broken")
    broken = {name for name, one in found.items() if one["state"] == "broken"}
    assert broken - {"store-clock"} == (set() if mild else {check})
    assert status == (0 if mild else 1)


def test_passwords_are_shown_nowhere(patient: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    patient.client.config_set("requirepass", "hunter22")
    patient.url = patient.url.replace("redis://", "redis://:hunter22@")
    assert run(["doctor", "--role", "operator", "--redis-url", patient.url]) == 0
    patient.url = patient.url.replace("hunter22", "hunter23")
    assert run(["doctor", "--role", "operator", "--redis-url", patient.url]) == 1
    out, err = capsys.readouterr()
    assert "hunter" not in out + err
    assert ":***@" in out


@pytest.mark.parametrize("role", list(rights.OF_ROLE))
def test_every_right_that_is_missing_is_named(client: PatientRedis, role: Role) -> None:
    table = rights.OF_ROLE[role]
    for command in sorted({name for listed in table.values() for name in listed.split()}):
        client.acl_deluser("r")
        client.execute_command(
            "ACL", "SETUSER", "r", "on", ">pw", "~*", "&*", "+@all", f"-{command.lower()}"
        )
        options = client.connection_pool.connection_kwargs
        url = f"redis://r:pw@127.0.0.1:{options['port']}/0"
        found = rights.check_rights(Machine(role, Given(redis_url=url)))
        assert found is not None
        assert found.state is State.BROKEN, command
        assert command.replace("|", " ") in found.message


def test_rights_are_checked_without_doing_anything(client: PatientRedis) -> None:
    port = client.connection_pool.connection_kwargs["port"]
    before = client.dbsize()
    for role in rights.OF_ROLE:
        given = Given(redis_url=f"redis://127.0.0.1:{port}/0")
        found = rights.check_rights(Machine(role, given))
        assert found is not None
        assert found.state is State.OK, found
    assert client.dbsize() == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB of its own; only root can have one."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounts are not for this user")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_small_disk_and_a_read_only_one_are_named(
    patient: Patient, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patient.store = Store.create(small_disk / "store")
    status, found = patient.examined(capsys)
    assert status == 1
    assert found["store-space"]["state"] == "broken"
    assert "on tmpfs at" in found["store-mount"]["message"]
    assert found["store-rename"]["state"] == "ok"

    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    status, found = patient.examined(capsys)
    assert found["store-access"]["state"] == "broken"
    assert "Read-only file system" in found["store-access"]["message"]
    assert "store-rename" not in found
