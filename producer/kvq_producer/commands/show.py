"""`kvq show`: all about one cache."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from kvq_producer import options


@click.command()
@click.argument("name")
@options.store
@click.option("--files", "with_files", is_flag=True, help="List its files too.")
@options.as_json
def show(name: str, store: str, with_files: bool, as_json: bool) -> None:
    """Show every field of the cache NAME, its quality, and its sizes on disk.

    With --json its files and block names are always among it.
    """
    from kvq.store.footprint import files_of, footprints
    from kvq.store.lifecycle import find, read_manifests
    from kvq.store.store import Store
    from kvq_producer import caches
    from kvq_producer.output import console

    opened = Store(store)
    manifest = find(opened, name)
    others = read_manifests(opened).readable
    footprint = footprints(opened.path, (others | {name: manifest}).values()).of[name]
    space = next((one for one in opened.spaces() if one.digest == manifest.space), None)
    files = files_of(opened.path, manifest) if with_files or as_json else []
    if as_json:
        found = {
            **caches.facts(manifest, footprint),
            "chain": manifest.chain,
            "branches": manifest.branches,
            "codec_parameters": space and dict(space.codec_parameters),
            "max_kv_size": space and space.max_kv_size,
            "files": [
                {**asdict(one), "path": str(one.path.relative_to(opened.path))} for one in files
            ],
        }
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    console().print(caches.fields_table(manifest, footprint, space))
    if with_files:
        click.echo()
        console().print(caches.files_table(opened, files))
