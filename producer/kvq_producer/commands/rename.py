"""`kvq rename`: another name for a cache."""

from __future__ import annotations

import json

import click

from kvq_producer import options


@click.command()
@click.argument("name")
@click.argument("new")
@options.store
@click.option("--force", is_flag=True, help="Replace the cache that has the new name.")
@options.as_json
def rename(name: str, new: str, store: str, force: bool, as_json: bool) -> None:
    """Give the cache NAME the name NEW. At no moment is it without a name."""
    from kvq.store.lifecycle import rename as rename_cache
    from kvq.store.store import Store

    opened = Store(store)
    moved = rename_cache(opened, name, new, force=force)
    if as_json:
        click.echo(json.dumps({"store": str(opened.path), "old": name, "name": moved.name}))
    else:
        click.echo(f"{name}: now {moved.name}")
