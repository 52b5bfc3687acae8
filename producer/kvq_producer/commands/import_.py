"""`kvq import`: a file that mlx-lm wrote, as a cache in the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.errors import UsageError
from kvq.units import format_bytes, parse_seconds
from kvq_producer import options

if TYPE_CHECKING:
    from kvq.exchange.importing import Import
    from kvq.store.keys import TokenIds


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", "-m", required=True, help="Model folder or hub id that made the file.")
@click.option("--adapter", help="Folder of a LoRA adapter.")
@click.option("--store", "-s", envvar="KVQ_STORE", required=True, help="The store.  [KVQ_STORE]")
@click.option("--create-store", is_flag=True, help="Make the store unless it exists.")
@click.option("--name", help="Name of the cache.  [the file's name and a digest, as in submit]")
@click.option("--token-ids", type=click.File("rb"), help="JSON file: the list of token ids.")
@click.option("--prompt", "-p", help="The text that mlx_lm.cache_prompt was given.")
@click.option(
    "--codec",
    type=click.Choice(["raw", "q8", "q4"]),
    default="q8",
    show_default=True,
    help="How tensors rest on disk.",
)
@click.option(
    "--ttl", type=options.accepted(parse_seconds), metavar="DURATION", help="Lifetime, such as 30d."
)
@click.option("--pin", is_flag=True, help="Never collect the cache.")
@options.metadata
@options.as_json
def import_(
    file: Path,
    model: str,
    adapter: str | None,
    store: str,
    create_store: bool,
    name: str | None,
    token_ids: Any,
    prompt: str | None,
    codec: str,
    ttl: float | None,
    pin: bool,
    metadata: dict[str, Any],
    as_json: bool,
) -> None:
    """Store the prompt cache in FILE, written by any version of mlx-lm, mlx-swift-lm or kvq.

    Which tokens it covers is read from the file if kvq wrote it; else give them, or the text. The
    model checks the first and the last of them.
    """
    from kvq.exchange import ImportRequest
    from kvq.exchange.importing import Import
    from kvq.model.loading import load
    from kvq.store.store import Store
    from kvq_producer.asked import ids_of_json
    from kvq_producer.submit.lookup import whole_key
    from kvq_producer.submit.wish import default_name

    if token_ids is not None and prompt is not None:
        raise UsageError("give --token-ids or --prompt, not both")
    given = None if token_ids is None else ids_of_json(token_ids.read())
    opened = Store.create(store) if create_store else Store(store)
    llm = load(model, adapter)
    found = Import(llm, file)
    ids = _chosen(found, given, prompt, llm.tokenizer)
    if name is None:
        word = file.name.removesuffix(".safetensors")
        name = default_name(word, whole_key(ids), model=model, adapter=adapter, codec=codec)
    request = ImportRequest(name=name, codec=codec, ttl=ttl, pin=pin, metadata=metadata)
    done = found.store(opened, request, ids)
    if as_json:
        click.echo(json.dumps(done.as_json()))
        return
    click.echo(f"{done.name}: {done.tokens:,} tokens, {format_bytes(done.bytes)}, {done.codec}")
    for note in done.notes:
        click.echo(f"kvq: {note}", err=True)


def _chosen(found: Import, given: TokenIds | None, prompt: str | None, tokenizer: Any) -> TokenIds:
    """The ids that were given, those of the text, or the file's own."""
    from kvq.exchange.texts import ids_of_text

    if given is not None:
        return given
    if prompt is not None:
        return ids_of_text(tokenizer, prompt, found.tokens)
    if found.ids is None:
        raise UsageError(
            f"{found.path} does not say which tokens its caches cover: "
            "give --prompt with the text that was cached, or --token-ids"
        )
    return found.ids
