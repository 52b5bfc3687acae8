"""`kvq gc`: collect what a store no longer needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from kvq.units import format_bytes, parse_bytes, parse_seconds
from kvq_producer import options

if TYPE_CHECKING:
    from pathlib import Path

    from kvq.store.gc import Report

#: A writer takes less (seconds) from its last look at the blocks to its manifest.
_SAFE_GRACE = 60.0
#: Longer than NFS and SMB clients remember directories, in seconds.
_NETWORK_SETTLE = 60.0
_LOCAL = frozenset(["ext4", "ext3", "ext2", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay",
                    "tmpfs", "apfs", "hfs"])  # fmt: skip


@click.command()
@options.store
@click.option("--yes", "-y", is_flag=True, help="Remove; without it only say what would go.")
@click.option(
    "--grace",
    default="1d",
    show_default=True,
    type=options.accepted(parse_seconds),
    metavar="DURATION",
    help="Spare what is younger; longer than any job.",
)
@click.option(
    "--settle",
    type=options.accepted(parse_seconds),
    metavar="DURATION",
    help="Wait before removing.  [0s on a local disk, else 60s]",
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
    settle: float | None,
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
    from kvq_producer.working import counting

    opened = Store(store)
    if grace < _SAFE_GRACE:
        click.echo("kvq: with a grace period this short, let nothing write meanwhile", err=True)
    policy = Policy(
        grace=grace,
        settle=_settle(opened.path) if settle is None else settle,
        max_bytes=max_bytes,
        expired=not keep_expired,
    )
    with counting() as show:
        report = collect(
            opened, policy, dry_run=not yes, on_progress=lambda files: show(f"{files:,} files")
        )
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        _print(report)
    return int(not report.complete)


def _settle(store: Path) -> float:
    """How long clients may remember a directory: not at all on a local disk."""
    from kvq_producer.doctor.mounts import mount_of

    mount = mount_of(store)
    return 0.0 if mount is not None and mount.kind in _LOCAL else _NETWORK_SETTLE


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
