"""`fleet`: what more workers bring to a batch, and what keeps them from more.

Real worker processes, a real server and a real store. Only the model is a stand-in: it sleeps as
long as a real one would compute, so that many workers fit on few cores.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import mlx.core as mx
import psutil
from rich.console import Console
from rich.table import Table
from servers import Server
from tinymodel import tiny_model
from workers import Fleet

from benchmarks.fleet_batch import longest_chain, shortest, write_prompts
from benchmarks.fleet_worker import RATE, Sleeper
from benchmarks.measure import machine
from kvq.queue import keys
from kvq.queue.batch import Batch
from kvq.queue.results import State
from kvq.settings import Settings
from kvq.store import Store
from kvq_producer.plan import JobKind, Plan, PlannedJob
from kvq_producer.submit.intake import take_in
from kvq_producer.submit.send import send
from kvq_producer.submit.wish import Wish
from kvq_producer.waiting import wait_for

WORKER = "benchmarks.fleet_worker.FleetWorker"
#: Caches of a batch that are compared with what the model computes in one go.
_CHECKED = 5


@dataclass(frozen=True, kw_only=True)
class Run:
    """One batch on `workers` workers. Durations are seconds; `jobs` those of its plan.

    `seconds` runs from the submit to the end of the last job, `planned` to that of the planning.
    `slept` is what the stand-in computed, `in_jobs` the time that jobs ran, `waited` that of
    workers before their first job and after their last; the three are sums over workers.
    `worker_cpu` and `server_cpu` are processor time.
    """

    workers: int
    seconds: float
    planned: float
    jobs: Sequence[PlannedJob]
    slept: float
    in_jobs: float
    waited: float
    worker_cpu: float
    server_cpu: float


def run(
    counts: Sequence[int],
    prompts: int,
    *,
    rate: float,
    alone: float | None = None,
    folder: str | None,
) -> None:
    """Print the table: `prompts` prompts at `rate` tokens/s on each number of workers.

    `alone` is how long one worker takes (s), where `counts` is not to begin with one.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temp, Server(Path(temp) / "server") as server:
        bench = _Bench(Path(temp), server, rate)
        try:
            runs = [bench.run(count, prompts, seed) for seed, count in enumerate(sorted(counts))]
        finally:
            for worker in bench.fleet.workers:
                worker.kill()
    _show(runs, prompts, rate, alone)


class _Bench:
    def __init__(self, folder: Path, server: Server, rate: float) -> None:
        self.folder, self.server, self.rate = folder, server, rate
        self.model = str(tiny_model(folder / "model"))
        self.store = Store.create(folder / "store")
        self.client = server.client()
        self.fleet = Fleet(folder, server, self.store)

    def run(self, workers: int, prompts: int, seed: int) -> Run:
        """One batch of its own tokens; workers are added to those that run already."""
        self._grow(workers)
        file = self.folder / f"prompts-{seed}.jsonl"
        write_prompts(file, prompts, seed)
        wish = Wish(model=self.model, codec="raw")
        before, began = self._cpu(), time.time()
        intake = take_in(str(file), wish)
        planned = time.time() - began
        with intake.plan as plan:
            batch = send(self.client, intake, wish, Settings.from_env()).batch
            wait_for(self.client, batch)
            after = self._cpu()
            self._check(batch, plan)
        times = self._times(batch)
        first = {worker: min(start for start, _ in of) for worker, of in times.items()}
        last = {worker: max(end for _, end in of) for worker, of in times.items()}
        end = max(last.values())
        return Run(
            workers=workers,
            seconds=end - began,
            planned=planned,
            jobs=plan.jobs,
            slept=plan.totals.prefill_tokens / self.rate,
            in_jobs=sum(end - start for of in times.values() for start, end in of),
            waited=sum(
                first.get(worker, end) - began + end - last.get(worker, end)
                for worker in range(workers)
            ),
            worker_cpu=after[0] - before[0],
            server_cpu=after[1] - before[1],
        )

    def _grow(self, workers: int) -> None:
        """Start those that are missing, and wait until each has its model warm."""
        new = [
            self.fleet.start(
                worker_class=WORKER,
                OPENBLAS_NUM_THREADS="1",
                **{RATE: str(self.rate)},
            )
            for _ in range(workers - len(self.fleet.workers))
        ]
        for worker in new:
            self.fleet.ready(worker)

    def _cpu(self) -> tuple[float, float]:
        """Processor seconds so far of all workers, and of the server."""
        return (
            sum(_cpu_seconds(worker.pid) for worker in self.fleet.workers),
            _cpu_seconds(self.server.pid),
        )

    def _check(self, batch: Batch, plan: Plan) -> None:
        """All prompts are stored, nothing was prefilled twice, and some caches are compared."""
        results = list(batch.results())
        assert all(one.state is State.STORED for one in results)
        computed = sum(one.facts["prefilled_tokens"] for one in results)
        assert computed <= sum(j.prefill_tokens for j in plan.jobs if j.kind is JobKind.PROMPT)
        model = Sleeper(math.inf)
        for job in plan.jobs[:: max(1, len(plan.jobs) // _CHECKED)]:
            ids = plan.ids(job)
            match = self.store.match("benchmark", ids)
            assert match.tokens == len(ids)
            right = model.make_cache()
            model(mx.array(ids)[None], right)
            for one, other in zip(match.load(model)[0].state, right[0].state, strict=True):
                assert one.tolist() == other.tolist() if isinstance(one, mx.array) else one == other

    def _times(self, batch: Batch) -> dict[int, list[tuple[float, float]]]:
        """When each worker's jobs began and ended, seconds since 1970, the workers numbered."""
        times: dict[bytes, list[tuple[float, float]]] = {}
        for piece in (*batch.prefixes(), *batch.prompts()):
            for one in piece:
                found = self.client.hmget(
                    keys.job(one.job_id), "worker_name", "started_at", "ended_at"
                )
                times.setdefault(found[0], []).append((_seconds(found[1]), _seconds(found[2])))
        return dict(enumerate(times.values()))


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _seconds(stamp: bytes) -> float:
    return datetime.fromisoformat(stamp.decode()).timestamp()


def _show(runs: Sequence[Run], prompts: int, rate: float, alone: float | None) -> None:
    base = runs[0]
    alone = alone or base.seconds * base.workers
    cost = (base.in_jobs - base.slept) / len(base.jobs)
    title = (
        f"{prompts} prompts, {len(base.jobs)} jobs, {rate:g} tokens/s, "
        f"{base.slept / len(base.jobs) * 1000:.0f} ms asleep a job, "
        f"longest chain {longest_chain(base.jobs, rate):.1f} s"
    )
    table = Table(title=f"{title}\n{machine()}", title_justify="left", title_style="")
    for column in (
        *("workers", "s", "jobs/s", "efficiency", "shortest possible s", "of it"),
        *("asleep", "rest of jobs", "between jobs", "no job", "cores: workers", "server"),
    ):
        table.add_column(column, justify="right")
    for one in runs:
        whole = one.seconds * one.workers
        ideal = shortest(one.jobs, one.workers, rate, cost)
        between = whole - one.in_jobs - one.waited
        table.add_row(
            str(one.workers),
            f"{one.seconds:.1f}",
            f"{len(one.jobs) / one.seconds:.1f}",
            f"{alone / whole:.2f}",
            f"{ideal:.1f}",
            f"{ideal / one.seconds:.2f}",
            *(
                f"{part / whole:.1%}"
                for part in (one.slept, one.in_jobs - one.slept, between, one.waited)
            ),
            f"{one.worker_cpu / one.seconds:.2f}",
            f"{one.server_cpu / one.seconds:.2f}",
        )
    Console(width=150).print(table)
    for one in runs:
        cpu = one.worker_cpu / len(one.jobs) * 1000
        print(f"{one.workers} workers: {cpu:.1f} ms of CPU a job; planned in {one.planned:.2f} s")
