"""What a worker makes of jobs, with real processes and a stand-in for the model."""

from __future__ import annotations

import subprocess
import sys

from jobs_for_tests import job, submit
from servers import Server
from workers import Fleet, environment, eventually

from kvq.queue import keys
from kvq.queue.batch import Batch
from kvq.queue.connection import PatientRedis
from kvq.queue.progress import Watch
from kvq.queue.results import PromptResult, State
from kvq.store.store import Store


def states(batch: Batch) -> list[State]:
    return [one.state for one in batch.results()]


def only_result(batch: Batch) -> PromptResult:
    (result,) = batch.results()
    return result


def test_plain_rq_worker_stores_what_was_submitted(fleet: Fleet, client: PatientRedis) -> None:
    batch = submit(client, [job(n, 100 + n) for n in range(20)])
    assert states(batch) == [State.PENDING] * 20
    worker = fleet.start("--burst")
    assert worker.wait(60) == 0
    results = list(batch.results())
    assert [one.state for one in results] == [State.STORED] * 20
    assert [one.custom_id for one in results] == [f"prompt-{n}" for n in range(20)]
    assert [one.facts["tokens"] for one in results] == [100 + n for n in range(20)]
    response = results[3].line()["response"]
    body = response["body"]
    assert response["status_code"] == 200
    assert (body["name"], body["tokens"], body["reused_tokens"]) == ("cache-3", 103, 0)
    assert body["worker"] in worker.output
    progress = Watch(client, batch).poll()
    assert progress.over
    assert progress.done_tokens == progress.work_tokens == sum(100 + n for n in range(20))
    # What is stored need not be kept in Redis too (the exact size varies with the machine's name).
    assert client.memory_usage(keys.job(job(0, 100).id)) < 1700


def test_children_run_after_their_prefix_and_before_all_others(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    prefix = job(1, 64, name="")
    children = [job(n, 64, parents=(prefix.id,)) for n in range(2, 22)]
    others = [job(n, 64) for n in range(30, 40)]
    batch = submit(client, [*others, *children], [prefix])
    client.lrem(keys.queue("kvq"), 1, prefix.id)
    client.lpush(keys.queue("kvq"), prefix.id)
    assert fleet.start("--burst").wait(60) == 0
    assert states(batch) == [State.STORED] * 30
    order = [line.split()[1] for line in (store.path / "standin" / "log").read_text().splitlines()]
    assert len(set(order)) == len(order) == 31
    assert client.zcard(keys.registry("deferred", "kvq")) == 0
    finished = [one.facts["worker"] for one in batch.results()]
    assert len(set(finished)) == 1
    assert client.exists(keys.dependents(prefix.id)) == 0


def test_a_failed_prefix_holds_nobody_up(fleet: Fleet, client: PatientRedis) -> None:
    wrong, broken = job(1, 64, name="", model="wrong"), job(2, 64, name="", model="broken")
    children = [job(n, 64, parents=(wrong.id, broken.id)) for n in range(3, 6)]
    batch = submit(client, children, [wrong, broken])
    assert fleet.start("--burst").wait(60) == 0
    assert states(batch) == [State.STORED] * 3


def test_children_of_a_prefix_whose_worker_died_at_the_last_moment_are_found(
    fleet: Fleet, client: PatientRedis
) -> None:
    prefix = job(1, 64, name="")
    batch = submit(client, [job(2, 64, parents=(prefix.id,))], [prefix])
    # Its worker recorded the end of the prefix and was gone before it released the child.
    client.hset(keys.job(prefix.id), mapping={"status": "finished", "kvq_outcome": "stored"})
    client.delete(keys.queue("kvq"))
    fleet.start()
    eventually(lambda: states(batch) == [State.STORED], 30)


def test_a_prompt_that_can_never_succeed_fails_once_with_its_reason(
    fleet: Fleet, client: PatientRedis
) -> None:
    batch = submit(client, [job(1, model="wrong"), job(2, 300)])
    worker = fleet.start("--burst", KVQ_MAX_TOKENS="280")
    assert worker.wait(60) == 0
    wrong, long = batch.results()
    assert (wrong.state, wrong.code) == (State.FAILED, "unsupported_model")
    assert wrong.line()["error"] == {
        "code": "unsupported_model",
        "message": "this model is unknown",
    }
    assert long.code == "prompt_too_long"
    assert "300 tokens" in long.message
    assert worker.output.count("tokens for wrong") == 1
    assert Watch(client, batch).poll().states[State.FAILED] == 2


def test_models_outside_the_allow_list_are_refused(fleet: Fleet, client: PatientRedis) -> None:
    names = ["mlx-community/good", "/models/a", "other/model", "/models/../etc/model"]
    batch = submit(client, [job(n, model=name) for n, name in enumerate(names)])
    assert fleet.start("--burst", KVQ_MODELS="mlx-community/*,/models/*").wait(60) == 0
    results = list(batch.results())
    assert [one.code for one in results] == ["", "", "model_not_allowed", "model_not_allowed"]
    assert "KVQ_MODELS is mlx-community/*,/models/*" in results[2].message


def test_a_failure_of_the_machine_is_tried_again_and_then_reported(
    fleet: Fleet, client: PatientRedis
) -> None:
    batch = submit(client, [job(1, model="broken"), job(2)])
    worker = fleet.start("--burst")
    assert worker.wait(60) == 0
    broken, good = batch.results()
    assert good.state is State.STORED
    assert (broken.state, broken.code) == (State.FAILED, "worker_failed")
    assert "each of 4 times that it ran" in broken.message
    assert "the machine failed" in broken.message
    assert worker.output.count("OSError: the machine failed") == 4

    assert batch.retry() == {"again": 1, "stored": 1}
    assert states(batch) == [State.PENDING, State.STORED]
    assert fleet.start("--burst").wait(60) == 0
    assert states(batch) == [State.FAILED, State.STORED]


def test_a_worker_without_its_store_takes_no_jobs(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    full, good = job(1, model="full"), job(2)
    batch = submit(client, [full, good])
    worker = fleet.start()
    assert worker.wait(60) == 75
    assert "this worker takes no more jobs: no space left" in worker.output
    # The job is the next again, and no try of it is spent.
    assert client.lrange(keys.queue("kvq"), 0, -1) == [full.id.encode(), good.id.encode()]
    assert client.hget(keys.job(full.id), "retries_left") == b"3"
    assert states(batch) == [State.PENDING, State.PENDING]

    (store.path / "kvq-store.json").unlink()
    gone = fleet.start()
    assert gone.wait(60) == 75
    assert "is not a kvq store" in gone.output
    assert client.llen(keys.queue("kvq")) == 2


def test_a_store_of_another_name_or_none_is_refused(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    (store.path.parent / "other").mkdir()
    elsewhere = job(1, store=str(store.path.parent / "other"))
    own = job(2, store=str(store.path.parent / "x" / ".." / "store"))
    batch = submit(client, [elsewhere, own, job(3)])
    assert fleet.start("--burst").wait(60) == 0
    refused, same, default = batch.results()
    assert refused.code == "invalid_message"
    assert "writes to" in refused.message
    assert same.state is default.state is State.STORED

    batch = submit(client, [job(4, store=str(store.path.parent / "other")), job(5)])
    assert fleet.start("--burst", KVQ_STORE="").wait(60) == 0
    missing, nameless = batch.results()
    assert missing.code == "store_not_found"
    assert nameless.code == "invalid_message"
    assert "set KVQ_STORE" in nameless.message


def test_cancel_drops_what_waits_and_stops_what_runs(
    fleet: Fleet, client: PatientRedis, store: Store
) -> None:
    running, shared = job(1, 64 * 200, model="slow"), job(2)
    waiting = [job(n) for n in range(3, 200)]
    batch = submit(client, [running, *waiting, shared])
    other = submit(client, [shared])
    fleet.start()
    eventually(lambda: Watch(client, batch).poll().done_tokens >= 64, 60)
    words = batch.cancel()
    assert words == {"stopping": 1, "dropped": 197, "shared": 1}
    eventually(lambda: states(other) == [State.STORED], 20)
    expected = [State.CANCELED] * 198 + [State.STORED]
    eventually(lambda: states(batch) == expected, 10)
    assert client.llen(keys.queue("kvq")) == client.llen(keys.intermediate("kvq")) == 0
    assert batch.cancel() == {"over": 199}
    # Submitted again, it goes on from the chunks that were finished.
    again = submit(client, [running])
    progress = eventually(lambda: Watch(client, again).poll().done_tokens >= 64, 20)
    assert progress < 20
    again.cancel()


def test_a_forking_rq_worker_works_and_is_told_once_how_to_do_better(
    fleet: Fleet, client: PatientRedis
) -> None:
    client.set("kvq:hinted:somebody", 1)
    batch = submit(client, [job(n, model="wrong/model") for n in range(3)])
    worker = fleet.start("--burst", worker_class=None, KVQ_MODELS="right/*")
    assert worker.wait(60) == 0
    assert [one.code for one in batch.results()] == ["model_not_allowed"] * 3
    assert worker.output.count("RQ_WORKER_CLASS=kvq_worker.ResidentWorker") == 1


def test_rq_s_own_tools_see_the_worker_and_its_queue(
    fleet: Fleet, client: PatientRedis, server: Server
) -> None:
    worker = fleet.ready(fleet.start())
    submit(client, [job(1, model="broken")])
    eventually(lambda: client.zcard(keys.registry("failed", "kvq")) == 1, 30)
    shown = subprocess.run(
        [sys.executable, "-m", "rq.cli", "info"],
        env=environment(server.url),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert f" {worker.pid})" in shown.stdout
    assert "1 failed" in shown.stdout
    requeued = subprocess.run(
        [sys.executable, "-m", "rq.cli", "requeue", "--queue", "kvq", "--all", "-S", "json"],
        env=environment(server.url),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert requeued.returncode == 0, requeued.stderr
    eventually(lambda: worker.output.count("OSError: the machine failed") == 5, 30)
