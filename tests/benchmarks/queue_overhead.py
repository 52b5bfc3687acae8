"""What the queue costs a job: a worker whose jobs compute nothing, and stand-in for the model.

    python tests/benchmarks/queue_overhead.py [--jobs 1000]

Counted from the queue to the stored result: taking the job, its lease, its result, its totals.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs_for_tests import job, submit
from servers import Server
from workers import Fleet

from kvq.queue.results import State
from kvq.store.store import Store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Server(Path(name) / "server") as server:
        folder, client = Path(name), server.client()
        fleet = Fleet(folder, server, Store.create(folder / "store"))

        def run() -> float:
            began = time.perf_counter()
            fleet.start("--burst", "--quiet").wait(600)
            return time.perf_counter() - began

        run()  # fills the caches that a first start finds cold
        idle = run()
        batch = submit(client, [job(n, 256) for n in range(options.jobs)])
        took = run() - idle
        assert all(one.state is State.STORED for one in batch.results())
        print(f"{options.jobs} jobs of 256 tokens: {took / options.jobs * 1000:.1f} ms a job")
        print(
            f"start and stop of a worker without MLX: {idle:.1f} s, load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()
