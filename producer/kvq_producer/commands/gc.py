"""`kvq gc`: collect what a store no longer needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from kvq.units import format_bytes, parse_bytes, parse_seconds
from kvq_producer import options

if TYPE_CHECKING:
    from kvq.store.gc import Report


@click.command()
@options.store
@click.option("--yes", "-y", is_flag=True, help="Remove; without it only say what would go.")
@click.option(
    "--grace",
    default="1d",
    show_default=True,
    type=options.accepted(parse_seconds),
    help="Spare what is younger; longer than any job.",
)
@click.option(
    "--settle",
    default="60s",
    show_default=True,
    type=options.accepted(parse_seconds),
    help="Wait before removing; 0s will do on a local disk.",
)
@click.option(
    "--max-bytes",
    type=options.accepted(parse_bytes),
    metavar="SIZE",
    help="Evict caches until the store takes no more, such as 500GB.",
)
@click.option("--keep-expired", is_flag=True, help="Leave caches whose time is up.")
@options.as_json
def gc(
    store: str,
    yes: bool,
    grace: float,
    settle: float,
    max_bytes: int | None,
    keep_expired: bool,
    as_json: bool,
) -> int:
    """Collect expired caches and blocks that no cache names, while workers write and apps read.

    A dry run unless --yes is given. With --max-bytes, caches of least worth go first: seconds to
    compute again, times use, for each byte; pinned caches stay. Exit status 1 when not all that
    was asked for could be done.
    """
    from kvq.store.gc import Policy, collect
    from kvq.store.store import Store

    policy = Policy(grace=grace, settle=settle, max_bytes=max_bytes, expired=not keep_expired)
    report = collect(Store(store), policy, dry_run=not yes)
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        _print(report)
    return int(not report.complete)


def _print(report: Report) -> None:
    for removed in report.caches:
        click.echo(f"{removed.name}: {removed.kind}, {removed.reason}")
    for kind, tally in report.files.items():
        click.echo(f"{kind}: {tally.files} files, {format_bytes(tally.nbytes)}")
    for name, reason in report.unreadable.items():
        click.echo(f"kvq: {name} cannot be read, so no blocks were collected: {reason}", err=True)
    if report.over_quota:
        over = format_bytes(report.over_quota)
        click.echo(f"kvq: still {over} over the quota: the rest is pinned or too young", err=True)
    word = "would be freed (a dry run; --yes removes)" if report.dry_run else "freed"
    kept = f"{report.kept_caches} caches with {format_bytes(report.kept_bytes)} stay"
    click.echo(f"{format_bytes(report.freed_bytes)} {word}; {kept}")
