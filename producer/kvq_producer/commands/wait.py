"""`kvq wait`: until a batch is done."""

from __future__ import annotations

from pathlib import Path

import click

from kvq.units import parse_seconds
from kvq_producer import options
from kvq_producer.options import Reach, accepted


@click.command()
@options.batch
@click.option(
    "--timeout",
    type=accepted(parse_seconds),
    metavar="DURATION",
    help="Give up after this long, with exit status 3.",
)
@options.output
@options.redis_url
@options.as_json
def wait(
    batch: str | None,
    timeout: float | None,
    output: Path | None,
    redis_url: str | None,
    as_json: bool,
) -> None:
    """Wait until BATCH (default: the newest) is done; fails if any of its prompts did."""
    from kvq.queue.connection import find_url
    from kvq_producer.finish import wait_and_finish

    settings = Reach(redis_url=redis_url, queue=None).settings
    url = find_url(settings.redis_url)
    wait_and_finish(settings, url, batch, output=output, as_json=as_json, timeout=timeout)
