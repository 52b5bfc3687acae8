"""The server that `kvq run` brings: private, and gone with the command that started it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from workers import eventually

from kvq.errors import QueueUnavailable, UsageError
from kvq.queue.connection import connect
from kvq_producer.guard import GuardedProcess
from kvq_producer.valkey import EmbeddedServer


def processes(word: str) -> list[str]:
    shown = subprocess.run(["ps", "-eww", "-o", "pid=,command="], capture_output=True, text=True)
    return [line for line in shown.stdout.splitlines() if word in line]


def test_it_is_private_and_keeps_its_data(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    with EmbeddedServer(folder) as server:
        assert server.alive
        client = server.client()
        client.set("kept", "yes")
        password = server.url.split(":")[2].split("@")[0]
        assert len(password) >= 24
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name in ("server.conf", "server.url", "lock"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert client.config_get("port")["port"] == "0"
        assert not any(password in line for line in processes(""))
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis(unix_socket_path=str(folder / "server.sock")).get("kept")
        client.close()
    assert not server.alive
    assert processes(str(folder)) == []
    with pytest.raises(QueueUnavailable):
        connect(server.url, patience=0)
    with EmbeddedServer(folder) as server:
        assert server.client().get("kept") == b"yes"
        assert password not in server.url


def test_a_path_too_long_for_a_socket_gives_a_port_of_loopback(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25) / 'with "quotes" and \\ and spaces'
    with EmbeddedServer(folder) as server:
        assert server.url.startswith("redis://:")
        assert "@127.0.0.1:" in server.url
        client = server.client()
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        client.set("kept", "yes")
    with EmbeddedServer(folder) as server:
        assert server.client().get("kept") == b"yes"


def test_one_at_a_time(tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path / "s"),
        pytest.raises(UsageError, match=f"process {os.getpid()}"),
        EmbeddedServer(tmp_path / "s"),
    ):
        pass


def test_it_stops_when_the_block_raises(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), EmbeddedServer(tmp_path / "s") as server:
        raise ZeroDivisionError
    assert not server.alive
    assert processes(str(tmp_path / "s")) == []


def test_it_is_revived_at_the_same_address(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "s") as server:
        client = server.client()
        client.set("kept", "yes")
        client.wait(0, 0)
        pid = client.info("server")["process_id"]
        eventually(lambda: client.info("persistence")["aof_pending_bio_fsync"] == 0)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not server.alive, 10)
        server.revive()
        assert client.info("server")["process_id"] != pid
        assert client.get("kept") == b"yes"


SCRIPT = """
import sys, time
from pathlib import Path
from kvq_producer.valkey import EmbeddedServer
with EmbeddedServer(Path(sys.argv[1])) as server:
    print(server.url, flush=True)
    time.sleep(600)
"""


def test_it_ends_when_its_command_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        connect(url).set("kept", "yes")
        owner.kill()
    eventually(lambda: processes(str(folder)) == [], 20)
    with EmbeddedServer(folder) as server:
        assert server.client().get("kept") == b"yes"


def test_a_server_left_behind_is_ended_before_another_starts(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        old = connect(url).info("server")["process_id"]
        # Its guard is killed first, so that nobody ends the server.
        guard = _parent(old)
        for pid in (guard, *_children(guard)):
            if pid != old:
                os.kill(pid, signal.SIGKILL)
        owner.kill()
    assert connect(url).set("kept", "yes")
    with EmbeddedServer(folder) as server:
        client = server.client()
        assert client.info("server")["process_id"] != old
        assert client.get("kept") == b"yes"
    assert processes(str(folder)) == []


def test_a_server_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "appendonlydir").write_text("in the way")
    with (
        pytest.raises(QueueUnavailable, match="did not start; its last words"),
        EmbeddedServer(tmp_path / "s"),
    ):
        pass
    assert processes(str(tmp_path / "s")) == []


def test_a_guarded_process_gives_its_exit_status_and_output(tmp_path: Path) -> None:
    process = GuardedProcess(["sh", "-c", "echo said; exit 7"], log=tmp_path / "log")
    eventually(lambda: process.poll() is not None, 10)
    assert process.poll() == 7
    assert process.last_lines() == "said"
    stubborn = GuardedProcess(
        ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"],
        log=tmp_path / "stubborn",
    )
    eventually(lambda: stubborn.last_lines() == "ready", 10)
    stubborn.stop(0.5)
    assert stubborn.poll() is not None
    assert processes("while :; do sleep 0.1") == []


def _parent(pid: int) -> int:
    shown = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True)
    return int(shown.stdout)


def _children(pid: int) -> list[int]:
    shown = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = [line.split() for line in shown.stdout.splitlines()]
    return [int(child) for child, parent in pairs if parent == str(pid)]
