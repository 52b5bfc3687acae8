"""`kvq ls`: the caches of a store and what they take."""

from __future__ import annotations

import json
import time

import click

from kvq.store.listing import Order
from kvq_producer import options


@click.command()
@options.store
@click.option(
    "--model",
    "-m",
    help="Only of this model: its name or a pattern, or a fingerprint's first digits.",
)
@click.option("--codec", type=click.Choice(["raw", "q8", "q4"]), help="Only of this codec.")
@click.option("--name", metavar="PATTERN", help="Only names like this, such as 'batch-7-*'.")
@click.option("--expired", is_flag=True, help="Only those whose lifetime has ended.")
@click.option("--pinned", is_flag=True, help="Only those that are pinned.")
@click.option(
    "--sort",
    "order",
    type=click.Choice([one.value for one in Order]),
    default="name",
    show_default=True,
    help="By name, else the newest or the largest first.",
)
@click.option("--reverse", "-r", is_flag=True, help="The other way round.")
@options.as_json
def ls(
    store: str,
    model: str | None,
    codec: str | None,
    name: str | None,
    expired: bool,
    pinned: bool,
    order: str,
    reverse: bool,
    as_json: bool,
) -> None:
    """List caches with their sizes on disk.

    `size` is that of all files of a cache's blocks, `own` the part that no other cache shares and
    that collecting it would free. `used` is known to the hour, from apps that may write to the
    store.
    """
    from kvq.store.footprint import footprints
    from kvq.store.lifecycle import read_manifests
    from kvq.store.listing import Filter, Row, arrange
    from kvq.store.store import Store
    from kvq.units import format_bytes
    from kvq_producer import caches
    from kvq_producer.output import console

    opened = Store(store)
    manifests = read_manifests(opened)
    every = manifests.readable.values()
    sizes = footprints(opened.path, every)
    wanted = Filter(model=model, codec=codec, name=name, expired=expired, pinned=pinned)
    now = time.time()
    rows = [
        Row(manifest=one, footprint=sizes.of[one.name]) for one in every if wanted.takes(one, now)
    ]
    rows = arrange(rows, Order(order), reverse=reverse)
    if as_json:
        found = {
            "store": str(opened.path),
            "caches": [caches.facts(row.manifest, row.footprint) for row in rows],
            "disk_bytes": sizes.nbytes,
            "unreadable": manifests.unreadable,
        }
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    caches.warn_unreadable(manifests)
    if rows:
        console().print(caches.table(rows))
    of = "" if len(rows) == len(every) else f" of {len(every)}"
    total = format_bytes(sizes.nbytes)
    click.echo(f"{len(rows)}{of} caches; all of them take {total}, shared blocks counted once")
