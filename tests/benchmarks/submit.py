"""`submit`: how many prompts a second `kvq submit` takes, from the file to the queue.

Each prompt repeats a few texts and differs in its last words. Beside it stands RQ's own enqueue
of the same payloads, one by one and in batches.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

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

#: Jobs for RQ's own enqueue.
_RQ_JOBS = 2000


def run(model: str, prompts: int, tokens: int) -> None:
    """Print rates of each step, and of RQ's own enqueue."""
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "server") as server:
        file = Path(folder) / "prompts.jsonl"
        with file.open("w") as lines:
            body = TEXT * max(1, tokens // 38)
            for n in range(prompts):
                # The first words differ, so that no prefix is shared: the most jobs and tokens.
                lines.write(json.dumps({"custom_id": f"p{n}", "prompt": f"{n}: {body}"}) + "\n")
        client = server.client()
        wish = Wish(model=model)
        began, cpu = time.perf_counter(), time.process_time()
        intake = take_in(str(file), wish)
        planned = time.perf_counter()
        with intake.plan:
            sent = send(client, intake, wish, Settings.from_env())
            done, cpu = time.perf_counter(), time.process_time() - cpu
            mean = intake.plan.totals.tokens / prompts
            print(f"{prompts} prompts of {mean:.0f} tokens, {dict(sent.words)}")
            print(f"  read, tokenize, plan  {prompts / (planned - began):8.0f} prompts/s")
            print(f"  enqueue               {prompts / (done - planned):8.0f} prompts/s")
            print(f"  end to end            {prompts / (done - began):8.0f} prompts/s")
            print(f"  this process's CPU    {cpu:8.1f} s, load {os.getloadavg()[0]:.1f}")
            used = client.info("memory")["used_memory"]
            print(f"  server memory         {used / prompts:8.0f} bytes a job")
            work = Work(intake=intake, wish=wish, batch="rq")
            messages = [job.message.encode() for job, _ in work.jobs(0, _RQ_JOBS)]
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
