"""`kvq rm`: forget caches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from kvq.errors import StoreError
from kvq_producer import options

if TYPE_CHECKING:
    from kvq.store.store import Store


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@options.store
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@options.as_json
def rm(names: tuple[str, ...], store: str, yes: bool, as_json: bool) -> None:
    """Forget the caches that are named, by names or by patterns such as 'batch-7-*'.

    Asks before it forgets more than one, or what a pattern found. A pattern leaves out what is
    pinned; a name does not. Their blocks stay on the disk until `kvq gc` finds that no other cache
    needs them.
    """
    from kvq.store.lifecycle import choose, forget, is_pattern
    from kvq.store.store import Store
    from kvq_producer import caches

    opened = Store(store)
    chosen = choose(opened, names)
    exact = {name for name in names if not is_pattern(name)}
    pinned = [one for one in chosen if one not in exact and _is_pinned(opened, one)]
    chosen = [one for one in chosen if one not in pinned]
    if chosen:
        caches.confirm("forget", names, chosen, yes=yes)
    gone = forget(opened, chosen)
    if as_json:
        found = {"store": str(opened.path), "forgotten": gone, "kept_pinned": pinned}
        click.echo(json.dumps(found))
        return
    for name in gone:
        click.echo(f"{name}: forgotten")
    for name in pinned:
        click.echo(f"kvq: {name} is pinned and stays: name it in full, or unpin it", err=True)
    if gone:
        click.echo("kvq: `kvq gc` frees their space", err=True)


def _is_pinned(store: Store, name: str) -> bool:
    try:
        return store.manifest(name).pinned
    except StoreError:
        return False
