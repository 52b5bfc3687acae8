"""`kvq export`: a stored cache as a file for apps that only know mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

from kvq.units import format_bytes
from kvq_producer import options


@click.command()
@click.argument("name")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--store", "-s", envvar="KVQ_STORE", required=True, help="The store.  [KVQ_STORE]")
@click.option(
    "--generation",
    type=click.Choice(["C", "A"]),
    default="C",
    show_default=True,
    help="C for mlx-lm 0.32 and later, A for 0.19.1 to 0.28.0.",
)
@click.option("--upto", type=click.IntRange(1), metavar="TOKENS", help="Only so many first tokens.")
@click.option("--model", "-m", help="Name by which mlx-lm finds the model.  [as it was submitted]")
@options.as_json
def export(
    name: str,
    file: Path,
    store: str,
    generation: Literal["A", "C"],
    upto: int | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Write the cache NAME to FILE, as mlx_lm.generate --prompt-cache-file reads it.

    Needs no model. A file of that name is replaced once the new one is whole.
    """
    from kvq.exchange import export_cache
    from kvq.store.store import Store

    done = export_cache(Store(store), name, file, generation=generation, upto=upto, model=model)
    if as_json:
        click.echo(json.dumps(done.as_json()))
    else:
        click.echo(f"{done.path}: {done.tokens:,} tokens, {format_bytes(done.bytes)}")
