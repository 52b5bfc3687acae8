"""`kvq pin`: caches that are kept whatever happens."""

from __future__ import annotations

import click

from kvq_producer import options


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@options.store
@options.as_json
def pin(names: tuple[str, ...], store: str, as_json: bool) -> None:
    """Keep the caches that are named, by names or patterns: `kvq gc` never takes them.

    Neither the end of their lifetime nor a quota matters until `kvq unpin`.
    """
    from kvq_producer.caches import pin_caches

    pin_caches(store, names, pinned=True, as_json=as_json)
