"""`kvq cancel`: drop what waits of a batch, stop what runs."""

from __future__ import annotations

import json

import click

from kvq_producer import options
from kvq_producer.options import Reach


@click.command()
@click.argument("batch")
@options.redis_url
@options.as_json
def cancel(batch: str, redis_url: str | None, as_json: bool) -> None:
    """Cancel BATCH. Prompts that run stop after their chunk; what is finished stays stored.

    Work that another batch wants too goes on.
    """
    from kvq.queue.batch import Batch
    from kvq.queue.connection import connect, find_url, queue_errors

    url = find_url(Reach(redis_url=redis_url, queue=None).settings.redis_url)
    connection = connect(url)
    with queue_errors(url):
        words = Batch.find(connection, batch).cancel()
    names = {"dropped": "dropped", "stopping": "stopping", "shared": "wanted by another batch",
             "over": "over already"}  # fmt: skip
    if as_json:
        click.echo(json.dumps({"batch": batch, **{name: words[name] for name in names}}))
    else:
        said = [f"{words[name]:,} {text}" for name, text in names.items() if words[name]]
        click.echo(f"batch {batch}, jobs: {', '.join(said) or 'none'}")
