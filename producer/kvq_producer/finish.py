"""The end of `submit --wait`, `wait` and `run`: wait, write, show, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from kvq.queue.batch import Batch
from kvq.queue.connection import connect, queue_errors
from kvq.queue.results import PromptResult
from kvq.settings import Settings
from kvq_producer.output import console, failures, results_table, write_results
from kvq_producer.waiting import wait_for

#: Exit status when the time given was not enough.
TIMED_OUT = 3


def wait_and_finish(
    settings: Settings,
    url: str,
    batch_id: str | None,
    *,
    output: Path | None,
    as_json: bool,
    timeout: float | None = None,
) -> None:
    """Wait for a batch (default: the newest), then `finish`. Waits too for a Redis that is gone."""
    connect(url)
    connection = connect(url, patience=settings.redis_patience)
    with queue_errors(url):
        batch = Batch.find(connection, batch_id)
        progress = wait_for(connection, batch, timeout=timeout)
        if not progress.over:
            left = progress.prompts - progress.finished
            click.echo(f"kvq: batch {batch.facts.id}: {left:,} prompts are not done yet", err=True)
            raise click.exceptions.Exit(TIMED_OUT)
        finish(batch.facts.id, list(batch.results()), output=output, as_json=as_json)


def finish(
    batch_id: str | None, results: list[PromptResult], *, output: Path | None, as_json: bool
) -> None:
    """Write the results, show them, and end with status 1 when any prompt is not stored."""
    if output is not None:
        write_results(output, results)
    on_screen = str(output) == "-"
    if as_json and not on_screen:
        click.echo(json.dumps({"batch": batch_id, **counts(results)}))
    elif not as_json:
        console(error=on_screen).print(results_table(results))
    if failures(results):
        raise click.exceptions.Exit(1)


def counts(results: Iterable[PromptResult]) -> dict[str, Any]:
    """Prompts by state, and sums of what their caches report."""
    found: dict[str, Any] = {"prompts": 0, "states": {}}
    sums = dict.fromkeys(("tokens", "reused_tokens", "bytes_written", "prefill_seconds"), 0.0)
    for one in results:
        found["prompts"] += 1
        found["states"][one.state.value] = found["states"].get(one.state.value, 0) + 1
        for name in sums:
            value = one.facts.get(name)
            sums[name] += value if isinstance(value, (int, float)) else 0
    return {**found, **{name: round(value, 4) for name, value in sums.items()}}
