"""`kvq submit`: hand a file of prompts to the workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvq_producer import options
from kvq_producer.options import Reach


@click.command()
@options.prompts_options
@click.option("--store", "-s", envvar="KVQ_STORE", help="The store, as the workers see it.")
@click.option("--create-store", is_flag=True, help="Make the store unless it exists.")
@click.option("--again", is_flag=True, help="Run again what a finished job says is done.")
@options.export
@click.option("--wait", is_flag=True, help="Wait until the batch is done.")
@options.output
@options.redis_url
@options.queue
@options.as_json
def submit(
    prompts: str,
    store: str | None,
    create_store: bool,
    skip_invalid: bool,
    again: bool,
    export: Path | None,
    wait: bool,
    output: Path | None,
    redis_url: str | None,
    queue: str | None,
    as_json: bool,
    **wish: Any,
) -> None:
    """Check every line of PROMPTS, tokenize, plan and enqueue; - reads standard input.

    A file with a fault is refused as a whole, each fault with its line, unless --skip-invalid.
    """
    if output is not None and not wait:
        raise click.UsageError("--output goes with --wait; later, `kvq results` writes them")
    from kvq.queue.connection import connect, find_url, queue_errors
    from kvq_producer.submit.intake import take_in
    from kvq_producer.submit.report import say_intake, say_sent, sent_facts
    from kvq_producer.submit.send import send
    from kvq_producer.submit.stores import visible_store
    from kvq_producer.submit.wish import Wish

    settings = Reach(redis_url=redis_url, queue=queue).settings
    # A Redis that is not there is found before minutes of tokenizing.
    url = find_url(settings.redis_url)
    connection = connect(url)
    visible, named = visible_store(store, create=create_store)
    wanted = Wish(**wish, store=named, export=None if export is None else str(export))
    intake = take_in(prompts, wanted, store=visible, skip_invalid=skip_invalid)
    with intake.plan, queue_errors(url):
        say_intake(intake)
        sent = send(connection, intake, wanted, settings, again=again)
        if not as_json:
            say_sent(sent, intake)
        elif not wait:
            click.echo(json.dumps(sent_facts(sent, intake)))
    if wait:
        from kvq_producer.finish import wait_and_finish

        wait_and_finish(settings, url, sent.batch.facts.id, output=output, as_json=as_json)
