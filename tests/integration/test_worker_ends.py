"""Workers that are killed, stopped, hung or cut off: their jobs go on, nothing is done twice."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from jobs_for_tests import job, submit
from servers import Server
from workers import Fleet, WorkerProcess, eventually

from kvq.queue import keys
from kvq.queue.batch import Batch
from kvq.queue.connection import PatientRedis
from kvq.queue.progress import Watch
from kvq.queue.results import State
from kvq.store.store import Store

CHUNK = 64


def state(batch: Batch) -> State:
    (result,) = batch.results()
    return result.state


def chunks(store: Store) -> list[tuple[int, str, int]]:
    """Process, prompt and first token of every chunk that was computed."""
    try:
        lines = (store.path / "standin" / "log").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(int(pid), key, int(start)) for pid, key, start, _ in map(str.split, lines)]


def started(worker: WorkerProcess, store: Store) -> bool:
    return any(pid == worker.pid for pid, _, _ in chunks(store))


def retries_left(client: PatientRedis, job_id: str) -> int:
    return int(client.hget(keys.job(job_id), "retries_left") or -1)


def test_the_job_of_a_killed_worker_goes_on_elsewhere_within_15_seconds(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    one = job(1, CHUNK * 60, model="slow")
    victim = fleet.ready(fleet.start())
    batch = submit(client, [one])
    eventually(lambda: started(victim, store), 30)
    other = fleet.ready(fleet.start())
    submit(client, [job(n) for n in range(100, 200)])
    victim.kill()
    took = eventually(lambda: started(other, store) and len(set(pids(store, 1))) == 2, 30)
    assert took < 15
    eventually(lambda: state(batch) is State.STORED, 60)
    done = [start for _, key, start in chunks(store) if key == key_of_first(store)]
    repeated = [start for start, times in Counter(done).items() if times > 1]
    assert len(repeated) <= 1
    assert sorted(set(done)) == list(range(0, CHUNK * 60, CHUNK))
    (result,) = batch.results()
    assert result.facts["reused_tokens"] > 0
    assert retries_left(client, one.id) == 2


def key_of_first(store: Store) -> str:
    return chunks(store)[0][1]


def pids(store: Store, nth: int) -> list[int]:
    """Processes that computed the first prompt that was begun."""
    first = key_of_first(store)
    return [pid for pid, key, _ in chunks(store) if key == first]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_told_to_stop_ends_after_its_chunk_and_the_job_is_next(
    fleet: Fleet, client: PatientRedis, store: Store, number: signal.Signals
) -> None:
    one, next_one = job(1, CHUNK * 40, model="slow"), job(2)
    worker = fleet.ready(fleet.start(STANDIN_CHUNK="0.3"))
    batch = submit(client, [one, next_one])
    eventually(lambda: started(worker, store), 30)
    worker.send(number)
    began = time.monotonic()
    assert worker.wait(20) == 0
    assert time.monotonic() - began < 5
    assert client.lrange(keys.queue("kvq"), 0, -1) == [one.id.encode(), next_one.id.encode()]
    assert retries_left(client, one.id) == 3
    assert client.zcard(keys.registry("wip", "kvq")) == 0
    assert [one.state for one in batch.results()] == [State.PENDING] * 2
    before = chunks(store)
    assert fleet.start("--burst", STANDIN_CHUNK="0").wait(60) == 0
    assert [one.state for one in batch.results()] == [State.STORED] * 2
    first = [start for _, key, start in chunks(store) if key == before[0][1]]
    assert first == list(range(0, CHUNK * 40, CHUNK))


def test_an_idle_worker_stops_at_once(fleet: Fleet) -> None:
    worker = fleet.ready(fleet.start())
    worker.send(signal.SIGTERM)
    began = time.monotonic()
    assert worker.wait(20) == 0
    assert time.monotonic() - began < 4


def test_a_second_signal_ends_a_worker_inside_an_evaluation(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    one = job(1, model="hang")
    worker = fleet.ready(fleet.start())
    submit(client, [one])
    eventually(lambda: (store.path / "standin" / "hanging").exists(), 30)
    worker.send(signal.SIGTERM)
    time.sleep(1)
    assert worker.alive
    worker.send(signal.SIGTERM)
    assert worker.wait(10) == 0
    assert client.lrange(keys.queue("kvq"), 0, -1) == [one.id.encode()]
    assert retries_left(client, one.id) == 3
    assert client.zcard(keys.registry("wip", "kvq")) == 0


def test_an_evaluation_that_hangs_ends_its_worker(fleet: Fleet, client: PatientRedis) -> None:
    one = job(1, model="hang")
    worker = fleet.start(KVQ_JOB_TIMEOUT="1", KVQ_GRACE="1")
    batch = submit(client, [one])
    assert worker.wait(60) == 70
    assert "has hung" in worker.output
    # Nobody gave the job back: another worker finds it when the lease ends.
    assert state(batch) is State.PENDING
    other = fleet.start(KVQ_JOB_TIMEOUT="1", KVQ_GRACE="1")
    assert other.wait(60) == 70
    assert retries_left(client, one.id) == 2


def test_a_job_past_its_timeout_is_tried_again_from_where_it_was(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    one = job(1, CHUNK * 12, model="slow")
    batch = submit(client, [one], timeout=1)
    assert fleet.start("--burst", STANDIN_CHUNK="0.3").wait(60) == 0
    assert state(batch) is State.STORED
    assert [start for _, _, start in chunks(store)] == list(range(0, CHUNK * 12, CHUNK))
    assert retries_left(client, one.id) < 3


def test_a_job_that_gets_on_is_never_given_up(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    one = job(1, CHUNK * 60, model="slow")
    batch = submit(client, [one])
    options = {"KVQ_LEASE": "3", "KVQ_HEARTBEAT": "0.2", "STANDIN_CHUNK": "0.3"}
    for _ in range(5):  # one more than a job may be run without getting on
        victim = fleet.start(**options)
        eventually(lambda v=victim: len([p for p, *_ in chunks(store) if p == v.pid]) >= 4, 30)
        victim.kill()
    fleet.start(**{**options, "STANDIN_CHUNK": "0"})
    eventually(lambda: state(batch) is State.STORED, 60)
    assert len({start for *_, start in chunks(store)}) == 60


def test_a_worker_whose_job_was_given_away_stops_and_writes_no_result(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    one = job(1, CHUNK * 100, model="slow")
    worker = fleet.ready(fleet.start())
    batch = submit(client, [one])
    eventually(lambda: started(worker, store), 30)
    client.delete(keys.registry("wip", "kvq"))
    client.hset(keys.job(one.id), "worker_name", "the-other")
    eventually(lambda: "another worker has taken it over" in worker.output, 30)
    assert client.hget(keys.job(one.id), "worker_name") == b"the-other"
    assert client.hget(keys.job(one.id), "status") == b"started"
    assert state(batch) is State.PENDING
    assert worker.alive


def test_a_job_popped_but_never_started_is_put_back(fleet: Fleet, client: PatientRedis) -> None:
    one = job(1)
    batch = submit(client, [one])
    client.lmove(keys.queue("kvq"), keys.intermediate("kvq"))
    fleet.start()
    eventually(lambda: state(batch) is State.STORED, 40)
    assert retries_left(client, one.id) == 3
    assert client.exists("kvq:popped:kvq") == 0


def test_a_lock_left_by_a_worker_that_died_in_maintenance_expires(
    fleet: Fleet, client: PatientRedis
) -> None:
    one = job(1)
    batch = submit(client, [one])
    client.lmove(keys.queue("kvq"), keys.intermediate("kvq"))
    client.set(f"{keys.RQ}:clean_registries:kvq", "dead", ex=15)
    fleet.start()
    eventually(lambda: state(batch) is State.STORED, 50)


def test_a_worker_ends_with_the_process_that_started_it(
    fleet: Fleet, client: PatientRedis, tmp_path: Path
) -> None:
    worker = fleet.ready(fleet.start(KVQ_PARENT="2147480000"))
    assert worker.wait(20) == 0
    assert "the process that started it has ended" in worker.output


@pytest.mark.parametrize("seconds", ["-3600", "3600"])
def test_a_worker_whose_clock_is_wrong_keeps_its_job(
    fleet: Fleet, client: PatientRedis, store: Store, seconds: str
) -> None:
    one = job(1, CHUNK * 120, model="slow")
    worker = fleet.ready(fleet.start(STANDIN_CLOCK=seconds))
    batch = submit(client, [one])
    eventually(lambda: started(worker, store), 30)
    fleet.ready(fleet.start())
    eventually(lambda: state(batch) is State.STORED, 60)
    assert len({pid for pid, _, _ in chunks(store)}) == 1
    assert retries_left(client, one.id) == 3


def test_redis_restarts_while_a_job_runs_and_when_it_ends(
    fleet: Fleet, server: Server, client: PatientRedis, store: Store
) -> None:
    worker = fleet.ready(fleet.start())
    batch = submit(client, [job(1, CHUNK * 30, model="slow"), job(2)])
    eventually(lambda: started(worker, store), 30)
    time.sleep(1.2)  # the server writes to disk every second
    server.kill()
    server.start()
    time.sleep(1.2)
    server.kill()
    key = key_of_first(store)
    eventually(lambda: (key, CHUNK * 29) in [(k, s) for _, k, s in chunks(store)], 30)
    time.sleep(1)
    server.start()
    eventually(lambda: [r.state for r in batch.results()] == [State.STORED] * 2, 60)
    assert worker.alive
    assert all(times <= 2 for times in Counter((k, s) for _, k, s in chunks(store)).values())


def test_redis_comes_back_without_its_data(
    fleet: Fleet, server: Server, client: PatientRedis, store: Store
) -> None:
    worker = fleet.ready(fleet.start())
    one = job(1, CHUNK * 60, model="slow")
    submit(client, [one])
    eventually(lambda: started(worker, store), 30)
    server.kill()
    server.wipe()
    server.start()
    eventually(lambda: "another worker has taken it over" in worker.output, 30)
    batch = submit(client, [one, job(2)])
    eventually(lambda: [r.state for r in batch.results()] == [State.STORED] * 2, 60)
    assert worker.alive
    assert Watch(client, batch).poll().over


def test_an_idle_worker_outlives_an_outage(
    fleet: Fleet, server: Server, client: PatientRedis
) -> None:
    worker = fleet.ready(fleet.start())
    server.kill()
    time.sleep(4)
    server.start()
    batch = submit(client, [job(1)])
    eventually(lambda: state(batch) is State.STORED, 20)
    assert worker.alive


def test_a_worker_told_to_stop_while_redis_is_gone_does_not_linger(
    fleet: Fleet, server: Server
) -> None:
    worker = fleet.ready(fleet.start())
    server.kill()
    time.sleep(1)
    worker.send(signal.SIGTERM)
    worker.wait(30)
    server.start()
