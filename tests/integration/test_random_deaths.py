"""Workers killed again and again at random moments: nothing is lost, and little is done twice."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

import pytest
from jobs_for_tests import job, submit
from workers import Fleet, eventually

from kvq.queue import keys
from kvq.queue.connection import PatientRedis
from kvq.queue.progress import Watch
from kvq.queue.results import State
from kvq.store.store import Store

CHUNK, KILLS, WORKERS, PROMPTS, PREFIXES = 64, 30, 4, 200, 10


@pytest.mark.slow
def test_200_prompts_over_4_workers_that_are_killed_at_random(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    dice = random.Random(7)
    prefixes = [job(1000 + n, CHUNK * 8, name="", model="slow") for n in range(PREFIXES)]
    prompts = [
        job(n, CHUNK * 8, model="slow", parents=(prefixes[n % PREFIXES].id,))
        for n in range(PROMPTS)
    ]
    batch = submit(client, prompts, prefixes)
    options = {"STANDIN_CHUNK": "0.1", "KVQ_LEASE": "3", "KVQ_HEARTBEAT": "0.5"}
    workers = [fleet.ready(fleet.start(**options)) for _ in range(WORKERS)]
    watch = Watch(client, batch)
    deadline, kills = time.monotonic() + 300, 0
    while not watch.poll().over:
        assert time.monotonic() < deadline
        time.sleep(dice.uniform(0.2, 1.5))
        if kills < KILLS:
            place = dice.randrange(WORKERS)
            if dice.random() < 0.8:
                workers[place].kill()
            else:
                workers[place].send(signal.SIGTERM)
                workers[place].wait(30)
            workers[place] = fleet.start(**options)
            kills += 1
    assert kills == KILLS

    results = list(batch.results())
    assert [one.custom_id for one in results] == [f"prompt-{n}" for n in range(PROMPTS)]
    assert [one.state for one in results] == [State.STORED] * PROMPTS
    assert sorted(path.stem for path in (store.path / "caches").iterdir()) == sorted(
        f"cache-{n}" for n in range(PROMPTS)
    )
    lines = (store.path / "standin" / "log").read_text().splitlines()
    done = Counter((key, start) for _, key, start, _ in map(str.split, lines))
    calm = (PROMPTS + PREFIXES) * 8
    assert len(done) == calm
    assert sum(done.values()) <= 1.05 * calm + KILLS
    eventually(lambda: client.zcard(keys.registry("wip", "kvq")) == 0, 20)
    assert client.llen(keys.queue("kvq")) == client.llen(keys.intermediate("kvq")) == 0
    assert client.zcard(keys.registry("deferred", "kvq")) == 0
    assert client.zcard(keys.registry("failed", "kvq")) == 0


def test_two_workers_on_one_prompt_leave_one_right_cache(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    one = job(1, CHUNK * 30, model="slow")
    batch = submit(client, [one])
    fleet.ready(fleet.start())
    eventually(lambda: (store.path / "standin" / "log").exists(), 30)
    # Somebody takes the lease away while its holder is alive, and queues the job again.
    client.delete(keys.registry("wip", "kvq"))
    client.hset(keys.job(one.id), "status", "queued")
    client.rpush(keys.queue("kvq"), one.id)
    fleet.start()
    eventually(lambda: [r.state for r in batch.results()] == [State.STORED], 60)
    (result,) = batch.results()
    assert result.facts["tokens"] == CHUNK * 30
    assert [path.name for path in (store.path / "caches").iterdir()] == ["cache-1.json"]
