"""What `submit` and `run` say of a batch before it is done."""

from __future__ import annotations

from typing import Any

import click

from kvq_producer.plan import Totals
from kvq_producer.submit.intake import Intake
from kvq_producer.submit.send import Sent


def say_intake(intake: Intake) -> None:
    """Warnings, and the lines that are left out, on standard error."""
    for warning in intake.warnings:
        click.echo(f"kvq: {warning}", err=True)
    faults = intake.faults
    if faults.count:
        click.echo(f"kvq: {faults.source}: left out {faults.lines:,} lines:", err=True)
        for fault in faults.kept[:20]:
            click.echo(f"  line {fault.line}: {fault.reason}", err=True)
        if faults.count > 20:
            click.echo(f"  and {faults.count - 20:,} more", err=True)


def summary(totals: Totals) -> str:
    """A batch in one line."""
    parts = [f"{totals.prompts:,} prompts", f"{totals.tokens:,} tokens"]
    if totals.already_stored:
        parts.append(f"{totals.already_stored:,} stored already")
    parts.append(f"{totals.jobs:,} jobs")
    parts.append(f"{totals.prefill_tokens:,} tokens to prefill")
    return ", ".join(parts)


def sent_facts(sent: Sent, intake: Intake) -> dict[str, Any]:
    """A submitted batch for programs."""
    totals = intake.plan.totals
    return {
        "batch": sent.batch.facts.id,
        "queue": sent.batch.facts.queue,
        "expires": sent.batch.facts.expires,
        "prompts": totals.prompts,
        "left_out": intake.faults.lines,
        "duplicates": totals.duplicates,
        "already_stored": totals.already_stored,
        "tokens": totals.tokens,
        "unique_tokens": totals.unique_tokens,
        "prefill_tokens": totals.prefill_tokens,
        "prompt_jobs": totals.prompt_jobs,
        "prefix_jobs": totals.prefix_jobs,
        "enqueued": sent.words["new"] + sent.words["deferred"],
        "under_way": sent.words["pending"],
        "done": sent.words["done"],
    }


def say_sent(sent: Sent, intake: Intake) -> None:
    """A submitted batch for people; its id alone is on standard output."""
    click.echo(f"kvq: {summary(intake.plan.totals)}", err=True)
    enqueued = sent.words["new"] + sent.words["deferred"]
    said = [f"{enqueued:,} enqueued"]
    if sent.words["pending"]:
        said.append(f"{sent.words['pending']:,} under way already")
    if sent.words["done"]:
        said.append(f"{sent.words['done']:,} done already")
    click.echo(f"kvq: jobs: {', '.join(said)}; follow them with `kvq wait`. Batch:", err=True)
    click.echo(sent.batch.facts.id)
