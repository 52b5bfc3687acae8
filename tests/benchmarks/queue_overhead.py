"""`queue-overhead`: what the queue costs a job; the worker's jobs compute nothing.

Counted from the queue to the stored result: taking the job, its lease, its result, its totals.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from jobs_for_tests import job, submit
from servers import Server
from workers import Fleet

from kvq.queue.results import State
from kvq.store.store import Store


def run(jobs: int) -> None:
    """Print milliseconds a job, and of a worker's start and end."""
    with tempfile.TemporaryDirectory() as name, Server(Path(name) / "server") as server:
        folder, client = Path(name), server.client()
        fleet = Fleet(folder, server, Store.create(folder / "store"))

        def empty_queue() -> float:
            began = time.perf_counter()
            fleet.start("--burst", "--quiet").wait(600)
            return time.perf_counter() - began

        empty_queue()  # fills the caches that a first start finds cold
        idle = empty_queue()
        batch = submit(client, [job(n, 256) for n in range(jobs)])
        took = empty_queue() - idle
        assert all(one.state is State.STORED for one in batch.results())
        print(f"{jobs} jobs of 256 tokens: {took / jobs * 1000:.1f} ms a job")
        print(
            f"start and stop of a worker without MLX: {idle:.1f} s, load {os.getloadavg()[0]:.1f}"
        )
