"""The server's configuration in deploy/: each role does its work with its own user, and no more."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from jobs_for_tests import job, submit
from redis.exceptions import AuthenticationError, NoPermissionError
from servers import free_port
from workers import WorkerProcess, environment, eventually

from kvq.errors import QueueUnavailable
from kvq.queue import scripts as queue_scripts
from kvq.queue.batch import Batch
from kvq.queue.connection import PatientRedis, connect
from kvq.queue.patience import Patience
from kvq.queue.progress import Watch
from kvq.queue.results import State
from kvq.store.store import Store
from kvq_producer.cli import run
from kvq_producer.doctor import rights
from kvq_producer.doctor.finding import State as Health
from kvq_producer.doctor.machine import Given, Machine, Role
from kvq_producer.valkey import find_server
from kvq_worker import scripts as worker_scripts

VALKEY = Path(__file__).parents[2] / "deploy" / "valkey"
ROLES = ("producer", "worker", "operator", "metrics")
#: What clients send by themselves at the start of every connection.
BY_ITSELF = {"AUTH", "HELLO", "CLIENT|SETINFO", "CLIENT|INFO", "PING", "SELECT"}


class Guarded:
    """A server with the rules of deploy/, and the URLs of its users."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        subprocess.run(
            ["sh", str(VALKEY / "make-users.sh"), str(folder), f"redis://127.0.0.1:{self.port}/0"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self.urls = {}
        for role in ROLES:
            name, _, url = (folder / f"{role}.env").read_text().strip().partition("=")
            assert name == "KVQ_REDIS_URL"
            self.urls[role] = url
        # One more, for what a test must see and no role may.
        with (folder / "users.acl").open("a") as file:
            file.write("user root on >root ~* &* +@all\n")
        conf = (VALKEY / "valkey.conf").read_text()
        conf = conf.replace("/etc/valkey/users.acl", str(folder / "users.acl"))
        conf = conf.replace("/var/lib/valkey", str(folder)).replace(
            "port 6379", f"port {self.port}"
        )
        (folder / "valkey.conf").write_text(conf)
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [find_server(), str(folder / "valkey.conf")], stdout=log, stderr=log
            )
        eventually(lambda: b"Ready to accept connections" in self.log.read_bytes(), 20)

    def client(self, role: str) -> PatientRedis:
        url = self.urls.get(role, f"redis://root:root@127.0.0.1:{self.port}/0")
        return PatientRedis.from_url(url, retry=Patience(5))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    server = Guarded(tmp_path / "valkey")
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("KVQ_", "RQ_", "REDIS_")):
            monkeypatch.delenv(name)


def used(guarded: Guarded) -> set[str]:
    stats = guarded.client("root").info("commandstats")
    names = {name.removeprefix("cmdstat_").upper() for name in stats}
    return {name for name in names if not name.startswith(("CONFIG", "INFO", "ACL"))} - BY_ITSELF


def allowed(role: Role) -> set[str]:
    return {name for listed in rights.OF_ROLE[role].values() for name in listed.split()}


def worker(guarded: Guarded, store: Store, folder: Path, *options: str) -> WorkerProcess:
    env = environment(guarded.urls["worker"], KVQ_STORE=str(store.path))
    return WorkerProcess(folder / "worker.log", env, *options)


def test_jobs_are_submitted_run_and_read_by_their_roles(
    guarded: Guarded, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    producer, root = guarded.client("producer"), guarded.client("root")
    root.config_resetstat()
    prefix = job(1, 64, name="")
    children = [job(n, 64, parents=(prefix.id,)) for n in range(2, 6)]
    slow = job(10, 64 * 200, model="slow")
    batch = submit(producer, [*children, job(7, model="wrong"), slow], [prefix])
    other = submit(producer, [job(8), job(9)])
    assert other.cancel() == {"dropped": 2}
    assert other.retry() == {"lost": 2}
    assert Watch(producer, batch).poll().states[State.PENDING] == 6
    for command in (["status"], ["status", batch.facts.id], ["results", batch.facts.id]):
        assert run([*command, "--redis-url", guarded.urls["producer"]]) == 0
    assert used(guarded) <= allowed(Role.PRODUCER)

    root.config_resetstat()
    one = worker(guarded, store, tmp_path)
    eventually(lambda: Watch(producer, batch).poll().done_tokens >= 64 * 7, 60, one.output)
    assert batch.cancel()["stopping"] == 1
    eventually(lambda: Watch(producer, batch).poll().over, 30, one.output)
    one.kill()
    assert worker(guarded, store, tmp_path, "--burst").wait(60) == 0
    states = [result.state for result in batch.results()]
    assert states == [State.STORED] * 4 + [State.FAILED, State.CANCELED]
    known = allowed(Role.WORKER) | allowed(Role.PRODUCER)
    rqs_own = {"EXEC", "MULTI", "WATCH", "SUBSCRIBE", "UNSUBSCRIBE"}
    assert used(guarded) <= known | rqs_own
    denied = [entry for entry in root.acl_log() if entry["reason"] != "auth"]
    assert denied == []

    operator = guarded.urls["operator"]
    assert run(["retry", batch.facts.id, "--redis-url", operator, "--json"]) == 0
    capsys.readouterr()
    assert run(["metrics", "--once", "--redis-url", guarded.urls["metrics"]]) == 0
    shown = capsys.readouterr().out
    assert 'kvq_jobs_stored_total{codec="raw",model="fast",queue="kvq"} 5.0' in shown
    assert 'kvq_jobs_failed_total{queue="kvq",reason="unsupported_model"} 1.0' in shown


def scripted(module: ModuleType) -> set[str]:
    """Every command that the scripts of a module run."""
    return set(re.findall(r"redis\.p?call\('([A-Z]+)'", Path(module.__file__ or "").read_text()))


def test_scripts_run_nothing_that_their_role_may_not() -> None:
    # Retrying and canceling are a producer's, too.
    assert scripted(queue_scripts) <= allowed(Role.PRODUCER)
    assert scripted(worker_scripts) <= allowed(Role.WORKER)
    rules = (VALKEY / "users.acl.in").read_text()
    for role in (Role.PRODUCER, Role.WORKER):
        (section,) = re.findall(rf"^user {role} .*?(?=^#|\Z)", rules, re.MULTILINE | re.DOTALL)
        granted = {word[1:].upper() for word in section.split() if word.startswith("+")}
        assert allowed(role) - BY_ITSELF - {"CLIENT|SETNAME"} <= granted


def test_a_stored_job_is_stored_even_if_what_waits_for_it_cannot_be_released(
    guarded: Guarded, store: Store, tmp_path: Path
) -> None:
    root = guarded.client("root")
    root.execute_command("ACL", "SETUSER", "worker", "-spop")
    prefix = job(1, 64, name="")
    batch = submit(root, [job(n, 64, parents=(prefix.id,)) for n in range(2, 6)], [prefix])
    one = worker(guarded, store, tmp_path)
    eventually(lambda: Watch(root, batch).poll().over, 30, one.output)
    assert [result.state for result in batch.results()] == [State.STORED] * 4
    assert "maintenance will release what waits for it" in one.output
    one.kill()


@pytest.mark.parametrize(
    ("role", "command"),
    [
        ("producer", "FLUSHALL"),
        ("producer", "KEYS *"),
        ("producer", "CONFIG GET *"),
        ("producer", "ACL LIST"),
        ("producer", "SHUTDOWN NOSAVE"),
        ("producer", "GET elsewhere"),
        ("producer", "SET rq:suspended 1"),
        ("producer", "HSET rq:worker:w state idle"),
        ("producer", "SADD rq:workers:kvq w"),
        ("producer", "ZADD rq:wip:kvq 1 x"),
        ("producer", "HSET kvq:tally:kvq x 1"),
        ("producer", "PUBLISH rq:pubsub:w x"),
        ("producer", "EVAL return 0"),
        ("worker", "FLUSHALL"),
        ("worker", "CONFIG SET dir /"),
        ("worker", "HGETALL kvq:batch:b"),
        ("worker", "ZRANGE kvq:batches 0 -1"),
        ("worker", "SET kvq:ids:x 1"),
        ("worker", "GET elsewhere"),
        ("worker", "PUBLISH rq:pubsub:w x"),
        ("operator", "FLUSHALL"),
        ("operator", "CONFIG SET appendonly no"),
        ("operator", "ACL SETUSER x"),
        ("operator", "GET elsewhere"),
        ("metrics", "HSET kvq:tally:kvq x 1"),
        ("metrics", "LPUSH rq:queue:kvq x"),
        ("metrics", "GET kvq:ids:x"),
        ("metrics", "FLUSHALL"),
    ],
)
def test_a_role_may_not(guarded: Guarded, role: str, command: str) -> None:
    with pytest.raises(NoPermissionError):
        guarded.client(role).execute_command(*command.split())


def test_nobody_gets_in_without_a_name(guarded: Guarded) -> None:
    for login in ("", "producer:guess@", ":guess@"):
        client = PatientRedis.from_url(
            f"redis://{login}127.0.0.1:{guarded.port}/0", retry=Patience(0)
        )
        with pytest.raises(AuthenticationError):
            client.ping()


@pytest.mark.parametrize("role", [Role.PRODUCER, Role.WORKER, Role.OPERATOR])
def test_the_doctor_finds_each_user_s_rights_sufficient(guarded: Guarded, role: Role) -> None:
    machine = Machine(role, Given(redis_url=guarded.urls[role.value]))
    found = rights.check_rights(machine)
    assert found is not None
    assert found.state is Health.OK, found


def test_the_doctor_finds_another_s_rights_wanting(guarded: Guarded) -> None:
    found = rights.check_rights(Machine(Role.WORKER, Given(redis_url=guarded.urls["producer"])))
    assert found is not None
    assert found.state is Health.BROKEN
    assert "BLMOVE rq:queue:kvq" in found.message
    none = rights.check_rights(Machine(Role.PRODUCER, Given(redis_url=guarded.urls["metrics"])))
    assert none is not None
    assert none.state is Health.NOTE


def test_passwords_are_new_private_and_kept(tmp_path: Path) -> None:
    made = {}
    for name in ("one", "two"):
        folder = tmp_path / name
        command = ["sh", str(VALKEY / "make-users.sh"), str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made[name] = {path.name: path.read_text() for path in folder.iterdir()}
        assert set(made[name]) == {"users.acl", *(f"{role}.env" for role in ROLES)}
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
        again = subprocess.run(command, capture_output=True, text=True)
        assert again.returncode == 1
        assert "exists" in again.stderr
    values = [text for files in made.values() for text in files.values()]
    assert len(set(values)) == len(values)
    assert "@" not in made["one"]["users.acl"].replace("-@", "").replace("+@", "")


@pytest.mark.parametrize("url", ["http://x", "redis://me:pw@host/0", "redis://"])
def test_urls_that_it_cannot_use_are_refused(tmp_path: Path, url: str) -> None:
    ran = subprocess.run(
        ["sh", str(VALKEY / "make-users.sh"), str(tmp_path / "x"), url],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert not (tmp_path / "x").exists()


def _tls_server() -> str | None:
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is None:
            continue
        said = subprocess.run(
            [path, "--port", "0", "--tls-port", "0", "--save", ""], capture_output=True
        )
        if b"Bad directive" not in said.stdout + said.stderr:
            return path
    return None


TLS_SERVER = _tls_server()


@pytest.mark.skipif(
    TLS_SERVER is None or shutil.which("openssl") is None, reason="no server with TLS here"
)
def test_tls_with_an_authority_of_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TLS_SERVER is not None
    folder, port = tmp_path / "etc", free_port()
    url = f"rediss://127.0.0.1:{port}/0"
    subprocess.run(["sh", str(VALKEY / "make-users.sh"), str(folder), url], check=True)
    subprocess.run(
        ["sh", str(VALKEY / "make-certs.sh"), str(folder), "localhost", "127.0.0.1"], check=True
    )
    subprocess.run(["sh", str(VALKEY / "make-certs.sh"), str(tmp_path / "other"), "x"], check=True)
    for name in ("valkey.conf", "valkey-tls.conf"):
        text = (VALKEY / name).read_text().replace("/etc/valkey", str(folder))
        text = text.replace("/var/lib/valkey", str(folder)).replace("6379", str(port))
        (folder / name).write_text(text)
    login = (folder / "producer.env").read_text().strip().partition("=")[2]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([TLS_SERVER, str(folder / "valkey-tls.conf")], stdout=log)
    try:
        eventually(lambda: b"Ready to accept" in (folder / "log").read_bytes(), 20)
        monkeypatch.setenv("KVQ_REDIS_CA", str(folder / "ca.crt"))
        batch = submit(connect(login), [job(1)])
        assert Batch.find(connect(login), batch.facts.id).facts.prompts == 1
        with pytest.raises(QueueUnavailable):
            connect(login.replace("rediss://", "redis://"), patience=0)
        monkeypatch.setenv("KVQ_REDIS_CA", str(tmp_path / "other" / "ca.crt"))
        with pytest.raises(QueueUnavailable, match=r"(?i)certificate"):
            connect(login, patience=0)
    finally:
        process.terminate()
        process.wait()


def test_the_rules_name_no_command_twice() -> None:
    text = (VALKEY / "users.acl.in").read_text()
    for user in text.split("\nuser ")[1:]:
        rules = [word for line in user.splitlines() if not line.startswith("#")
                 for word in line.split() if word.startswith("+")]  # fmt: skip
        assert len(set(rules)) == len(rules), user.split()[0]
