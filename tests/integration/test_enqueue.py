"""What is in Redis after jobs were enqueued, read with RQ's own classes."""

from __future__ import annotations

import threading
import time
from array import array

import rq
from rq.job import Job, JobStatus
from rq.registry import DeferredJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

from kvq.queue import keys
from kvq.queue.connection import PatientRedis
from kvq.queue.enqueue import Enqueuer, JobToEnqueue
from kvq.queue.messages import JOB_FUNCTION, CacheToWrite, PrefillMessage
from kvq.queue.shared_ids import SharedPrefix

LIFETIME = 600


def packed(*ids: int) -> bytes:
    return array("I", ids).tobytes()


def message(*ids: int, name: str = "a") -> PrefillMessage:
    return PrefillMessage(model="m", tail=packed(*ids), caches=(CacheToWrite(name=name),))


def job(number: int, *parents: str, **options: bool) -> JobToEnqueue:
    one = message(number, name=f"cache-{number}")
    return JobToEnqueue(id=one.job_id(one.tail), message=one, parents=parents, **options)


def enqueuer(client: PatientRedis, batch: str = "one", queue: str = "kvq") -> Enqueuer:
    return Enqueuer(client, queue, batch=batch, timeout=60, lifetime=LIFETIME)


def fetch(client: PatientRedis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=client, serializer=JSONSerializer)


def queued(client: PatientRedis) -> list[str]:
    return [one.decode() for one in client.lrange(keys.queue("kvq"), 0, -1)]


def test_key_names_are_rq_s(client: PatientRedis) -> None:
    queue = rq.Queue("kvq", connection=client)
    one = Job("x", connection=client)
    assert keys.queue("kvq") == queue.key
    assert queue.redis_queues_keys == keys.QUEUES
    assert keys.intermediate("kvq") == queue.intermediate_queue_key
    assert keys.registry("wip", "kvq") == StartedJobRegistry(queue=queue).key
    assert keys.registry("deferred", "kvq") == queue.deferred_job_registry.key
    assert keys.registry("finished", "kvq") == queue.finished_job_registry.key
    assert keys.registry("failed", "kvq") == queue.failed_job_registry.key
    assert keys.registry("canceled", "kvq") == queue.canceled_job_registry.key
    assert rq.Worker.redis_workers_keys == keys.WORKERS
    assert (keys.job("x"), keys.dependents("x"), keys.dependencies("x")) == (
        one.key, one.dependents_key, one.dependencies_key,
    )  # fmt: skip
    assert keys.results("x") == Result.get_key("x")


def test_rq_reads_an_enqueued_job(client: PatientRedis) -> None:
    one = job(1)
    assert enqueuer(client).enqueue([one]) == ["new"]
    read = fetch(client, one.id)
    assert read.func_name == JOB_FUNCTION
    assert PrefillMessage.decode(read.args[0]) == one.message
    assert (read.kwargs, read.origin, read.timeout) == ({}, "kvq", 60)
    assert read.get_status() is JobStatus.QUEUED
    assert (read.retries_left, read.retry_intervals) == (3, [0])
    assert read.enqueue_at_front_on_retry
    assert read.result_ttl == read.failure_ttl == LIFETIME
    assert read.description == "1 tokens for m: cache-1"
    assert LIFETIME - 5 <= client.ttl(keys.job(one.id)) <= LIFETIME
    assert queued(client) == [one.id]
    assert [queue.name for queue in rq.Queue.all(client)] == ["kvq"]


def test_the_same_work_is_enqueued_once_whoever_asks(client: PatientRedis) -> None:
    jobs = [job(number) for number in range(250)]
    assert enqueuer(client).enqueue(jobs) == ["new"] * 250
    assert enqueuer(client).enqueue(jobs) == ["pending"] * 250
    assert enqueuer(client, "two").enqueue([*jobs[:2], job(900)]) == ["pending", "pending", "new"]
    assert queued(client) == [*(one.id for one in jobs), job(900).id]
    assert client.hget(keys.job(jobs[0].id), "kvq_batches") == b"one,two"


def test_two_producers_at_once_enqueue_each_job_once(client: PatientRedis) -> None:
    jobs = [job(number) for number in range(300)]
    words: list[list[str]] = []

    def produce(batch: str) -> None:
        mine = enqueuer(client, batch)
        words.append([mine.enqueue([one])[0] for one in jobs])

    threads = [threading.Thread(target=produce, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for together in zip(*words, strict=True):
        assert sorted(together) == ["new", "pending", "pending"]
    assert sorted(queued(client)) == sorted(one.id for one in jobs)


def test_a_child_waits_for_parents_that_are_under_way(client: PatientRedis) -> None:
    parent, done = job(1), job(2)
    child = job(3, parent.id, done.id, "0" * 32)
    mine = enqueuer(client)
    mine.enqueue([done])
    client.hset(keys.job(done.id), "status", "finished")
    assert mine.enqueue([parent, child]) == ["new", "deferred"]
    assert queued(client) == [done.id, parent.id]
    read = fetch(client, child.id)
    assert read.get_status() is JobStatus.DEFERRED
    assert read.dependency_ids == [parent.id]
    assert read.allow_dependency_failures
    assert fetch(client, parent.id).dependent_ids == [child.id]
    registry = DeferredJobRegistry("kvq", connection=client)
    assert registry.get_job_ids() == [child.id]

    # RQ itself lets the child go once its parent is over.
    client.hset(keys.job(parent.id), "status", "finished")
    queue = rq.Queue("kvq", connection=client, serializer=JSONSerializer)
    queue.enqueue_dependents(fetch(client, parent.id))
    assert queued(client) == [child.id, done.id, parent.id]


def test_front_goes_before_all_that_wait(client: PatientRedis) -> None:
    enqueuer(client).enqueue([job(1), job(2), job(3, front=True)])
    assert queued(client) == [job(3).id, job(1).id, job(2).id]


def test_finished_work_is_trusted_or_run_again(client: PatientRedis) -> None:
    one = job(1)
    mine = enqueuer(client)
    mine.enqueue([one])
    client.delete(keys.queue("kvq"))
    client.hset(keys.job(one.id), mapping={"status": "finished", "kvq_outcome": "stored"})
    client.xadd(keys.results(one.id), {"type": 1})
    client.expire(keys.job(one.id), 5)
    client.expire(keys.results(one.id), 5)
    assert mine.enqueue([one]) == ["done"]
    assert client.ttl(keys.job(one.id)) > 5
    assert client.ttl(keys.results(one.id)) > 5
    assert mine.enqueue([job(1, trust=False)]) == ["new"]
    assert not client.exists(keys.results(one.id))
    assert client.hget(keys.job(one.id), "kvq_outcome") is None
    for status, outcome in [("finished", "failed"), ("failed", ""), ("canceled", "")]:
        client.hset(keys.job(one.id), mapping={"status": status, "kvq_outcome": outcome})
        client.zadd(keys.registry("failed", "kvq"), {one.id: time.time() + 99})
        assert mine.enqueue([one]) == ["new"]
        assert client.zcard(keys.registry("failed", "kvq")) == 0


def test_shared_ids_are_kept_once_for_the_longest_lifetime(client: PatientRedis) -> None:
    ids = packed(1, 2, 3)
    prefix = SharedPrefix.of(ids)
    enqueuer(client).enqueue([job(1)], [(prefix, ids)])
    assert client.get(prefix.key) == ids
    assert LIFETIME - 5 <= client.ttl(prefix.key) <= LIFETIME
    Enqueuer(client, "kvq", batch="b", timeout=1, lifetime=60).enqueue([], [(prefix, ids)])
    assert client.ttl(prefix.key) > 60
    Enqueuer(client, "kvq", batch="b", timeout=1, lifetime=6000).enqueue([], [(prefix, ids)])
    assert client.ttl(prefix.key) > LIFETIME
