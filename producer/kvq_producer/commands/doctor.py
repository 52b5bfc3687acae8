"""`kvq doctor`: what is wrong here, and how to mend it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvq_producer import options

if TYPE_CHECKING:
    from kvq_producer.doctor.finding import Finding

_COLORS = {"ok": "green", "note": None, "warning": "yellow", "broken": "red"}


@click.command()
@click.option(
    "--role",
    type=click.Choice(["producer", "worker", "operator", "app"]),
    help="What this machine is for.  [what its packages are for]",
)
@click.option(
    "--store",
    "-s",
    envvar="KVQ_STORE",
    type=click.Path(path_type=Path),
    help="The store to examine.  [KVQ_STORE]",
)
@click.option("--quiet", "-q", is_flag=True, help="Show only what is broken or will be.")
@options.redis_url
@options.queue
@options.as_json
def doctor(
    role: str | None,
    store: Path | None,
    quiet: bool,
    redis_url: str | None,
    queue: str | None,
    as_json: bool,
) -> None:
    """Check this machine, its Redis and its store; fails when something is broken.

    One line a check, and below what is not well, what to do. Nothing is changed; in the store a
    folder is made and removed.
    """
    from kvq_producer.doctor.checks import examine, worst
    from kvq_producer.doctor.finding import State
    from kvq_producer.doctor.machine import Given, Machine, Role, guess_role

    given = Given(redis_url=redis_url, queue=queue, store=store.absolute() if store else None)
    machine = Machine(Role.PRODUCER, given)
    machine = Machine(Role(role) if role else guess_role(machine.installed), given)
    shown = (State.WARNING, State.BROKEN) if quiet else tuple(State)
    findings: list[Finding] = []
    for one in examine(machine):
        findings.append(one)
        if not as_json and one.state in shown:
            _say(one)
    status = worst(findings)
    if as_json:
        facts = {
            "role": machine.role.value,
            "worst": status.value,
            "findings": [one.as_json() for one in findings],
        }
        click.echo(json.dumps(facts, ensure_ascii=False))
    elif not quiet:
        click.echo(_summary(findings, machine.role.value))
    if status is State.BROKEN:
        raise click.exceptions.Exit(1)


def _say(one: Finding) -> None:
    from kvq_producer.output import printable

    state = click.style(f"{one.state.value:<8}", fg=_COLORS[one.state.value])
    click.echo(f"{state} {one.check:<17} {printable(one.message)}")
    if one.mend:
        click.echo(f"{'':<26} -> {printable(one.mend)}")


def _summary(findings: list[Finding], role: str) -> str:
    counts = {name: sum(one.state.value == name for one in findings) for name in _COLORS}
    wrong = [f"{counts[name]} {name}" for name in ("broken", "warning") if counts[name]]
    return f"{len(findings)} checks for the role {role}: {', '.join(wrong) or 'all well'}"
