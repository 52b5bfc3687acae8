"""`kvq results`: what became of each prompt of a batch."""

from __future__ import annotations

from pathlib import Path

import click

from kvq_producer import options
from kvq_producer.options import Reach


@click.command()
@options.batch
@click.option("--failed", is_flag=True, help="Only prompts that are not stored.")
@options.output
@options.redis_url
def results(batch: str | None, failed: bool, output: Path | None, redis_url: str | None) -> None:
    """Print a JSON line for each prompt of BATCH (default: the newest), in the file's order.

    The lines have the shape of OpenAI's batch output; a body describes the cache.
    """
    from kvq.queue.batch import Batch
    from kvq.queue.connection import connect, find_url, queue_errors
    from kvq.queue.results import State
    from kvq_producer.output import write_results

    settings = Reach(redis_url=redis_url, queue=None).settings
    url = find_url(settings.redis_url)
    connection = connect(url)
    with queue_errors(url):
        found = Batch.find(connection, batch).results()
        chosen = (one for one in found if not failed or one.state is not State.STORED)
        write_results(output or Path("-"), chosen)
