"""How many prompts a second `kvq submit` takes, from the file to the queue.

    python tests/benchmarks/submit_rate.py MODEL [--prompts 20000] [--tokens 256]

Each prompt repeats a few texts and differs in its last words. Beside it stands RQ's own enqueue
of the same payloads, one by one and in batches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import rq
from rq.serializers import JSONSerializer
from servers import Server

from kvq.settings import Settings
from kvq_producer.submit.intake import take_in
from kvq_producer.submit.jobs import Work
from kvq_producer.submit.send import send
from kvq_producer.submit.wish import Wish

TEXT = (
    "The ferry leaves the north pier at seven in the morning and is back at nine in the evening, "
    "except on Sundays, when the captain sleeps until noon and the cook bakes bread for the town. "
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rq", type=int, default=2000, help="jobs for RQ's own enqueue")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "server") as server:
        file = Path(folder) / "prompts.jsonl"
        with file.open("w") as lines:
            body = TEXT * max(1, options.tokens // 38)
            for n in range(options.prompts):
                # The first words differ, so that no prefix is shared: the most jobs and tokens.
                lines.write(json.dumps({"custom_id": f"p{n}", "prompt": f"{n}: {body}"}) + "\n")
        client = server.client()
        wish = Wish(model=options.model)
        began, cpu = time.perf_counter(), time.process_time()
        intake = take_in(str(file), wish)
        planned = time.perf_counter()
        with intake.plan:
            sent = send(client, intake, wish, Settings.from_env())
            done, cpu = time.perf_counter(), time.process_time() - cpu
            tokens = intake.plan.totals.tokens / options.prompts
            print(f"{options.prompts} prompts of {tokens:.0f} tokens, {dict(sent.words)}")
            print(f"  read, tokenize, plan  {options.prompts / (planned - began):8.0f} prompts/s")
            print(f"  enqueue               {options.prompts / (done - planned):8.0f} prompts/s")
            print(f"  end to end            {options.prompts / (done - began):8.0f} prompts/s")
            print(f"  this process's CPU    {cpu:8.1f} s, load {os.getloadavg()[0]:.1f}")
            used = client.info("memory")["used_memory"]
            print(f"  server memory         {used / options.prompts:8.0f} bytes a job")
            work = Work(intake=intake, wish=wish, batch="rq")
            messages = [job.message.encode() for job, _ in work.jobs(0, options.rq)]
        queue = rq.Queue("other", connection=client, serializer=JSONSerializer)
        began = time.perf_counter()
        for message in messages:
            queue.enqueue("kvq_worker.jobs.prefill", message, description="x")
        took = time.perf_counter() - began
        print(f"  RQ enqueue            {len(messages) / took:8.0f} jobs/s")
        began = time.perf_counter()
        data = [
            rq.Queue.prepare_data("kvq_worker.jobs.prefill", (one,), description="x")
            for one in messages
        ]
        queue.enqueue_many(data)
        took = time.perf_counter() - began
        print(f"  RQ enqueue_many       {len(messages) / took:8.0f} jobs/s")


if __name__ == "__main__":
    main()
