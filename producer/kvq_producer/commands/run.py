"""`kvq run`: prefill a file of prompts on this machine, with nothing to set up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvq_producer import options


@click.command()
@options.prompts_options
@click.option(
    "--store",
    "-s",
    envvar="KVQ_STORE",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the store; made when it does not exist.  [KVQ_STORE]",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Worker processes, each with its own copy of the model.",
)
@options.export
@options.output
@options.as_json
def run(
    prompts: str,
    store: Path,
    workers: int,
    export: Path | None,
    skip_invalid: bool,
    output: Path | None,
    as_json: bool,
    **wish: Any,
) -> None:
    """Prefill PROMPTS into a store, with a server and workers of this command's own.

    Stopped with Ctrl-C or killed, it goes on where it was when it is run again.
    """
    from kvq.settings import Settings
    from kvq.store.store import Store
    from kvq_producer.finish import finish
    from kvq_producer.run import run_batch, terminated_as_interrupted
    from kvq_producer.submit.intake import take_in
    from kvq_producer.submit.report import say_intake, summary
    from kvq_producer.submit.wish import Wish

    settings = Settings.from_env()
    with terminated_as_interrupted():
        opened = Store.create(store)
        if export is not None:
            export.mkdir(parents=True, exist_ok=True)
        wanted = Wish(**wish, export=None if export is None else str(export))
        intake = take_in(prompts, wanted, store=opened.path, skip_invalid=skip_invalid)
        with intake.plan:
            say_intake(intake)
            click.echo(f"kvq: {summary(intake.plan.totals)}", err=True)
            results = run_batch(intake, wanted, opened, settings, workers=workers)
    finish(None, results, output=output, as_json=as_json)
