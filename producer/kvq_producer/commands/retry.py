"""`kvq retry`: run what failed of a batch again."""

from __future__ import annotations

import json

import click

from kvq_producer import options
from kvq_producer.options import Reach


@click.command()
@options.batch
@options.redis_url
@options.as_json
def retry(batch: str | None, redis_url: str | None, as_json: bool) -> None:
    """Run the prompts of BATCH (default: the newest) again that failed.

    Those that `cancel` stopped while they ran are run again too; those that it dropped from the
    queue are gone: submit them again.
    """
    from kvq.queue.batch import Batch
    from kvq.queue.connection import connect, find_url, queue_errors

    url = find_url(Reach(redis_url=redis_url, queue=None).settings.redis_url)
    connection = connect(url)
    with queue_errors(url):
        found = Batch.find(connection, batch)
        words = found.retry()
    names = {"again": "run again", "pending": "still to run", "stored": "stored",
             "lost": "no longer in Redis: submit them again"}  # fmt: skip
    if as_json:
        click.echo(json.dumps({"batch": found.facts.id, **{name: words[name] for name in names}}))
    else:
        said = [f"{words[name]:,} {text}" for name, text in names.items() if words[name]]
        click.echo(f"batch {found.facts.id}, jobs: {', '.join(said) or 'none'}")
