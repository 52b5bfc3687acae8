"""`kvq worker`: RQ's worker with the settings that prefilling needs."""

from __future__ import annotations

import os
import shlex

import click

from kvq_producer import options


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--store", "-s", help="The only store that this worker writes to.  [KVQ_STORE]")
@click.option("--models", help="Models that it may load: names and globs.  [KVQ_MODELS, or *]")
@click.option("--burst", is_flag=True, help="End when the queue is empty.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), help="How its log is written.  [text]"
)
@click.option(
    "--print-environment", is_flag=True, help="Print what makes a plain `rq worker` the same."
)
@options.redis_url
@options.queue
@click.argument("rq_options", nargs=-1, type=click.UNPROCESSED)
def worker(
    store: str | None,
    models: str | None,
    burst: bool,
    log_format: str | None,
    print_environment: bool,
    redis_url: str | None,
    queue: str | None,
    rq_options: tuple[str, ...],
) -> None:
    """Take prefill jobs from the queue, until stopped.

    Everything after the options goes to `rq worker` as it is.
    """
    from kvq_worker.environment import worker_command, worker_environment

    given = {"KVQ_REDIS_URL": redis_url, "KVQ_QUEUE": queue, "KVQ_STORE": store,
             "KVQ_MODELS": models, "KVQ_LOG_FORMAT": log_format}  # fmt: skip
    base = {**os.environ, **{name: value for name, value in given.items() if value}}
    environment = worker_environment(base)
    if print_environment:
        for name in sorted(set(environment) - set(os.environ) | set(given) & set(environment)):
            click.echo(f"export {name}={shlex.quote(environment[name])}")
        return
    command = worker_command(environment, *(["--burst"] if burst else []), *rq_options)
    os.execve(command[0], command, environment)
