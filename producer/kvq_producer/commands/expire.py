"""`kvq expire`: the end of caches' lifetimes."""

from __future__ import annotations

import json
import time

import click

from kvq_producer import options


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.argument("when")
@options.store
@options.as_json
def expire(names: tuple[str, ...], when: str, store: str, as_json: bool) -> None:
    """Let the caches that are named, by names or patterns, expire at WHEN.

    WHEN is a duration from now on such as 7d, a time such as 2031-05-01T12:00 (local time, or
    with its zone), or never. What has expired is taken by the next `kvq gc`.
    """
    from kvq.store.lifecycle import choose, parse_expiry, set_expiry
    from kvq.store.store import Store
    from kvq_producer import caches

    try:
        expires = parse_expiry(when)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'WHEN'") from None
    opened = Store(store)
    changed = set_expiry(opened, choose(opened, names), expires)
    if as_json:
        found = {
            "store": str(opened.path),
            "caches": [
                {"name": one.name, "expires": one.expires, "pinned": one.pinned} for one in changed
            ],
        }
        click.echo(json.dumps(found))
        return
    said = "never expires" if expires is None else f"expires {caches.when(expires, time.time())}"
    for one in changed:
        click.echo(f"{one.name}: {said}{', but is pinned' if one.pinned else ''}")
