"""Batches, the queue and its workers, as facts and as text."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvq.queue import keys
from kvq.queue.batch import Batch
from kvq.queue.progress import Watch
from kvq.queue.results import State
from kvq.units import format_seconds
from kvq_producer.output import printable


def batch_facts(connection: Any, batch_id: str) -> dict[str, Any]:
    """How one batch stands."""
    return _facts(connection, Batch.find(connection, batch_id))


def _facts(connection: Any, batch: Batch) -> dict[str, Any]:
    progress = Watch(connection, batch).poll()
    facts = batch.facts
    return {
        "batch": facts.id,
        "source": facts.source,
        "created": facts.created,
        "expires": facts.expires,
        "queue": facts.queue,
        "models": list(facts.models),
        "store": facts.store,
        "prompts": facts.prompts,
        "jobs": facts.jobs,
        "states": {state.value: progress.states[state] for state in State},
        "running": progress.running,
        "done_tokens": progress.done_tokens,
        "work_tokens": progress.work_tokens,
    }


def fleet_facts(connection: Any, queue: str) -> dict[str, Any]:
    """All batches, and the queue with its workers."""
    names = sorted(one.decode() for one in connection.smembers(f"{keys.WORKERS}:{queue}"))
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(name, "state", "hostname", "pid", "last_heartbeat", "successful_job_count")
        found = pipe.execute()
    workers = []
    for name, values in zip(names, found, strict=True):
        state, host, pid, beat, done = (
            one.decode("utf-8", "replace") if one else "" for one in values
        )
        if state:
            workers.append(
                {
                    "name": name.removeprefix(f"{keys.RQ}:worker:"),
                    "state": state,
                    "host": host,
                    "pid": int(pid) if pid.isdecimal() else None,
                    "last_heartbeat": beat,
                    "jobs": int(done) if done.isdecimal() else 0,
                }
            )
    batches = sorted(Batch.all(connection), key=lambda one: one.facts.created)
    return {
        "queue": queue,
        "waiting": connection.llen(keys.queue(queue)),
        "deferred": connection.zcard(keys.registry("deferred", queue)),
        "running": connection.zcard(keys.registry("wip", queue)),
        "workers": workers,
        "batches": [_facts(connection, one) for one in batches],
    }


def batch_text(facts: dict[str, Any]) -> RenderableType:
    """One batch for people."""
    table = Table.grid(padding=(0, 2))
    states = facts["states"]
    shown = ", ".join(f"{count:,} {state}" for state, count in states.items() if count)
    left = facts["expires"] - time.time()
    for name, value in (
        ("batch", facts["batch"]),
        ("source", facts["source"]),
        ("models", ", ".join(facts["models"])),
        ("store", facts["store"] or "each worker's own"),
        ("prompts", f"{facts['prompts']:,}: {shown}"),
        ("jobs", f"{facts['jobs']:,}, {facts['running']:,} running"),
        ("tokens", f"{facts['done_tokens']:,} of {facts['work_tokens']:,} prefilled"),
        ("remembered", f"for {format_seconds(max(0.0, left))} more"),
    ):
        table.add_row(Text(name, style="bold"), Text(printable(str(value))))
    return table


def fleet_text(facts: dict[str, Any]) -> RenderableType:
    """The queue, its workers and all batches for people."""
    head = Text(
        f"queue {facts['queue']}: {facts['waiting']:,} jobs waiting, {facts['deferred']:,} waiting "
        f"for a prefix, {facts['running']:,} running"
    )
    workers = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "state", "host", "pid", "jobs done"):
        workers.add_column(name)
    for one in facts["workers"]:
        cells = (one["name"], one["state"], one["host"], one["pid"], one["jobs"])
        workers.add_row(*(Text(printable(str(cell))) for cell in cells))
    batches = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("batch", "source", "prompts", "stored", "pending", "not stored"):
        batches.add_column(name)
    for one in facts["batches"]:
        states = one["states"]
        failed = one["prompts"] - states["stored"] - states["pending"]
        row = (one["batch"], one["source"], one["prompts"], states["stored"], states["pending"],
               failed)  # fmt: skip
        batches.add_row(*(Text(printable(str(cell))) for cell in row))
    empty = Text("no worker listens: start one with `kvq worker`", style="yellow")
    return Group(head, "", workers if facts["workers"] else empty, "", batches)
