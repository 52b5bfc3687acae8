"""The worker as it is shipped, with MLX and a real model, however small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from jobs_for_tests import submit
from servers import Server
from tinymodel import tiny_model
from workers import RESIDENT, Fleet, WorkerProcess, clean_environment, eventually

from kvq.queue.connection import PatientRedis
from kvq.queue.enqueue import JobToEnqueue
from kvq.queue.messages import CacheToWrite, PrefillMessage
from kvq.queue.progress import Watch
from kvq.queue.results import State
from kvq.store.blockfile import check_data, read_header
from kvq.store.keys import pack
from kvq.store.store import Store
from kvq_producer.waiting import wait_for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def prompt(model: Path, seed: int, tokens: int, **options: object) -> JobToEnqueue:
    ids = pack(np.random.default_rng(seed).integers(10, 380, tokens).astype(np.uint32))
    message = PrefillMessage(
        model=str(model),
        codec="raw",
        tail=ids,
        caches=(CacheToWrite(name=f"cache-{seed}"),),
        custom_ids=(f"prompt-{seed}",),
    )
    return JobToEnqueue(id=message.job_id(ids), message=message, **options)  # type: ignore[arg-type]


def check_files(store: Store) -> int:
    """How many block files there are, all whole; what a killed writer left begins with a dot."""
    files = [
        path for path in store.path.glob("spaces/*/nodes/*/*/*") if not path.name.startswith(".")
    ]
    for path in files:
        check_data(read_header(path))
    assert not list((store.path / "quarantine").glob("*"))
    return len(files)


def memory(worker: WorkerProcess) -> int:
    return int(psutil.Process(worker.pid).memory_info().rss)


def test_stopped_and_killed_workers_leave_whole_blocks_and_the_next_goes_on(
    fleet: Fleet, client: PatientRedis, store: Store, model: Path
) -> None:
    batch = submit(client, [prompt(model, 1, 7000), prompt(model, 2, 300)])
    for number in (signal.SIGTERM, signal.SIGKILL):
        worker = fleet.start(worker_class=RESIDENT, KVQ_STEP="256", KVQ_LEASE="3",
                             KVQ_HEARTBEAT="0.5")  # fmt: skip
        before = len(list(store.path.glob("spaces/*/nodes/*/*/*")))
        eventually(lambda b=before: len(list(store.path.glob("spaces/*/nodes/*/*/*"))) >= b + 2, 90)
        worker.send(number)
        status = worker.wait(60)
        assert status == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    eventually(lambda: not list(store.path.glob("caches/*")), 1)
    last = fleet.start("--burst", worker_class=RESIDENT, KVQ_STEP="256", KVQ_LEASE="3",
                       KVQ_HEARTBEAT="0.5")  # fmt: skip
    # The job of the killed one comes back when its lease ends; burst may end before.
    last.wait(120)
    if not Watch(client, batch).poll().over:
        time.sleep(4)
        assert fleet.start("--burst", worker_class=RESIDENT).wait(120) == 0
    long, short = batch.results()
    assert long.state is short.state is State.STORED
    assert long.facts["reused_tokens"] >= 512
    assert check_files(store) >= 7000 // 256 + 2
    assert store.names() == ["cache-1", "cache-2"]


@pytest.mark.slow
def test_memory_stays_flat_over_many_jobs(
    fleet: Fleet, client: PatientRedis, store: Store, model: Path
) -> None:
    worker = fleet.start(worker_class=RESIDENT)
    warm = submit(client, [prompt(model, n, 200) for n in range(1000, 1100)])
    wait_for(client, warm)
    before = memory(worker)
    rest = submit(client, [prompt(model, n, 200) for n in range(2000, 2900)])
    wait_for(client, rest)
    assert worker.alive
    grown = memory(worker) - before
    assert grown < 0.1 * before, f"{grown / 2**20:.0f} MiB more than {before / 2**20:.0f} MiB"
    assert {one.state for one in rest.results()} == {State.STORED}
    assert psutil.Process(worker.pid).num_threads() < 60
    assert psutil.Process(worker.pid).num_fds() < 100


def test_models_are_loaded_once_and_dropped_when_room_is_short(
    fleet: Fleet, client: PatientRedis, tmp_path: Path, model: Path
) -> None:
    other = tiny_model(tmp_path / "other", seed=5)
    jobs = [prompt(which, n, 100) for n, which in enumerate([model, other, model, other, model])]
    batch = submit(client, jobs)
    size = (model / "model.safetensors").stat().st_size
    worker = fleet.start("--burst", worker_class=RESIDENT, KVQ_MODEL_MEMORY=str(int(size * 1.5)))
    assert worker.wait(120) == 0, worker.output
    results = list(batch.results())
    assert [one.state for one in results] == [State.STORED] * 5
    assert len({one.facts["space"] for one in results}) == 2


def test_a_model_that_cannot_be_used_fails_once_with_its_reason(
    fleet: Fleet, client: PatientRedis, tmp_path: Path, model: Path
) -> None:
    broken = tiny_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not tensors")
    foreign = tiny_model(tmp_path / "foreign")
    config = (foreign / "config.json").read_text()
    (foreign / "config.json").write_text(config.replace('"llama"', '"no-such-architecture"'))
    code = tiny_model(tmp_path / "code")
    mark = tmp_path / "ran"
    (code / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    config = (code / "config.json").read_text()
    remote = '{"model_file": "evil.py", "auto_map": {"AutoTokenizer": ["evil.X", null]},'
    (code / "config.json").write_text(config.replace("{", remote, 1))
    names = [tmp_path / "nowhere", broken, foreign, code, model]
    batch = submit(client, [prompt(name, n, 100) for n, name in enumerate(names)])
    worker = fleet.start("--burst", worker_class=RESIDENT, HF_HUB_OFFLINE="1")
    assert worker.wait(120) == 0
    results = list(batch.results())
    assert [one.state for one in results] == [State.FAILED] * 4 + [State.STORED]
    assert results[0].code == "model_not_found"
    assert {one.code for one in results[1:4]} <= {"unsupported_model", "model_not_found"}
    assert not mark.exists()


def test_a_forking_rq_worker_stores_too(
    fleet: Fleet, client: PatientRedis, store: Store, model: Path
) -> None:
    batch = submit(client, [prompt(model, n, 300) for n in range(2)])
    worker = fleet.start("--burst", worker_class=None)
    assert worker.wait(180) == 0, worker.output
    assert [one.state for one in batch.results()] == [State.STORED] * 2
    assert worker.output.count("RQ_WORKER_CLASS=kvq_worker.ResidentWorker") == 1
    # Without kvq's job class RQ must be told that jobs are JSON.
    again = submit(client, [prompt(model, 3, 300)])
    bare = fleet.start("--burst", "-S", "json", worker_class=None, RQ_JOB_CLASS="rq.job.Job")
    assert bare.wait(180) == 0, bare.output
    assert [one.state for one in again.results()] == [State.STORED]
    assert store.names() == ["cache-0", "cache-1", "cache-3"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, where this process may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("mounting needs root on Linux")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_stops_the_worker_and_the_job_goes_on_when_there_is_room(
    fleet: Fleet, client: PatientRedis, small_disk: Path, model: Path
) -> None:
    store = Store.create(small_disk / "store")
    options = {"KVQ_STORE": str(store.path), "KVQ_MIN_FREE": "0", "KVQ_STEP": "256"}
    # 512 bytes a token: 2,000 fit, 8,000 do not.
    small, large = prompt(model, 1, 2000), prompt(model, 2, 8000)
    batch = submit(client, [small, large])
    worker = fleet.start("--burst", worker_class=RESIDENT, **options)
    assert worker.wait(180) == 75, worker.output
    assert "this worker takes no more jobs" in worker.output
    assert [one.state for one in batch.results()] == [State.STORED, State.PENDING]
    assert store.names() == ["cache-1"]
    check_files(store)
    enlarge = ["mount", "-o", "remount,size=64m", str(small_disk)]
    subprocess.run(enlarge, check=True)
    assert fleet.start("--burst", worker_class=RESIDENT, **options).wait(180) == 0
    results = list(batch.results())
    assert [one.state for one in results] == [State.STORED] * 2
    assert results[1].facts["reused_tokens"] > 0
    check_files(store)


def test_a_share_that_is_unmounted_is_not_written_to(
    fleet: Fleet, client: PatientRedis, small_disk: Path, model: Path
) -> None:
    store = Store.create(small_disk / "store")
    options = {"KVQ_STORE": str(store.path), "KVQ_MIN_FREE": "0"}
    worker = fleet.start(worker_class=RESIDENT, **options)
    batch = submit(client, [prompt(model, 1, 300)])
    eventually(lambda: Watch(client, batch).poll().over, 60)
    subprocess.run(["umount", "-l", str(small_disk)], check=True)
    (small_disk / "store").mkdir()  # the mount point, and what a careless writer would fill
    batch = submit(client, [prompt(model, 2, 300)])
    assert worker.wait(60) == 75
    assert [one.state for one in batch.results()] == [State.PENDING]
    assert list((small_disk / "store").iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(small_disk)], check=True)


def test_kvq_worker_is_that_worker(
    client: PatientRedis, server: Server, store: Store, model: Path, tmp_path: Path
) -> None:
    batch = submit(client, [prompt(model, 1, 300)])
    command = [sys.executable, "-m", "kvq_producer", "worker", "--burst"]
    command += ["--store", str(store.path), "--models", f"{model.parent}/*"]
    command += ["--redis-url", server.url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    (result,) = batch.results()
    assert result.state is State.STORED
    assert result.facts["worker"] in done.stdout + done.stderr
    refused = submit(client, [prompt(tmp_path / "other", 2, 300)])
    assert subprocess.run(
        command, capture_output=True, timeout=120, cwd=tmp_path, env=clean_environment()
    ).returncode == 0  # fmt: skip
    assert [one.code for one in refused.results()] == ["model_not_allowed"]
