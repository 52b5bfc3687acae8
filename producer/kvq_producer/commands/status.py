"""`kvq status`: batches, the queue and its workers."""

from __future__ import annotations

import json

import click

from kvq_producer import options
from kvq_producer.options import Reach


@click.command()
@options.batch
@options.redis_url
@options.queue
@options.as_json
def status(batch: str | None, redis_url: str | None, queue: str | None, as_json: bool) -> None:
    """Show how BATCH stands, or without one all batches, the queue and its workers."""
    from kvq.queue.connection import connect, find_url, queue_errors
    from kvq_producer.output import console
    from kvq_producer.overview import batch_facts, batch_text, fleet_facts, fleet_text

    settings = Reach(redis_url=redis_url, queue=queue).settings
    url = find_url(settings.redis_url)
    connection = connect(url)
    with queue_errors(url):
        if batch is None:
            facts = fleet_facts(connection, settings.queue)
            text = fleet_text(facts)
        else:
            facts = batch_facts(connection, batch)
            text = batch_text(facts)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        console().print(text)
