"""`kvq unpin`: caches that may be collected again."""

from __future__ import annotations

import click

from kvq_producer import options


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@options.store
@options.as_json
def unpin(names: tuple[str, ...], store: str, as_json: bool) -> None:
    """Let the caches that are named, by names or patterns, be collected when their time comes."""
    from kvq_producer.caches import pin_caches

    pin_caches(store, names, pinned=False, as_json=as_json)
