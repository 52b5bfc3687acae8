"""`kvq verify`: does everything in a store hold?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from kvq_producer import options

if TYPE_CHECKING:
    from kvq.cache.replay import Replay
    from kvq.store.verify import VerifyReport


@click.command()
@options.store
@click.option("--quick", is_flag=True, help="Check names and headers only, not the tensors.")
@click.option("--repair", is_flag=True, help="Put damaged files into quarantine.")
@click.option("--replay", "replays", multiple=True, metavar="NAME", help="Also generate from it.")
@click.option("--model", "-m", help="The model to replay with.  [what the cache was made with]")
@click.option("--tokens", default=8, show_default=True, help="Tokens to generate in a replay.")
@options.as_json
def verify(
    store: str,
    quick: bool,
    repair: bool,
    replays: tuple[str, ...],
    model: str | None,
    tokens: int,
    as_json: bool,
) -> int:
    """Check digests, keys, chains and manifests of everything in a store.

    With --replay, the cache's prompt is also continued twice, from the cache and computed anew, and
    the tokens compared; those of a lossy codec may differ. Exit status 1 when anything is wrong.
    """
    from kvq.store.store import Store
    from kvq.store.verify import verify as check
    from kvq.units import format_bytes
    from kvq_producer.working import counting

    opened = Store(store)
    with counting() as show:
        report = check(
            opened,
            deep=not quick,
            repair=repair,
            on_progress=lambda files, read: show(f"{files:,} files, {format_bytes(read)} read"),
        )
    replayed = [_replay(opened, name, model, tokens) for name in replays]
    wrong = not report.ok or not all(one.sound for one in replayed)
    if as_json:
        found: dict[str, Any] = report.as_json()
        found["replays"] = [one.as_json() for one in replayed]
        click.echo(json.dumps(found))
    else:
        _print(report, replayed)
    return int(wrong)


def _replay(store: Any, name: str, model: str | None, tokens: int) -> Replay:
    from kvq.cache.replay import replay
    from kvq.model.loading import load

    return replay(store, load(model or store.manifest(name).model), name, tokens=tokens)


def _print(report: VerifyReport, replayed: list[Replay]) -> None:
    from kvq.store.verify import Severity
    from kvq.units import format_bytes

    for one in report.findings:
        click.echo(f"{one.severity}: {one.path}: {one.what}\n  {one.advice}")
    for again in replayed:
        word = "same" if again.same else "OTHER" if again.exact else "other"
        click.echo(f"replay {again.name}: {word} tokens, {again.reused} of {again.prompt} reused")
    errors = report.count(Severity.ERROR)
    click.echo(
        f"{report.caches} caches, {report.files} files, {format_bytes(report.nbytes)} read: "
        + ("all is sound" if report.ok else "1 error" if errors == 1 else f"{errors} errors")
    )
