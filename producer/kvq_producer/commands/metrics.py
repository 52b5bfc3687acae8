"""`kvq metrics`: figures for Prometheus."""

from __future__ import annotations

import threading
from importlib.metadata import version
from pathlib import Path

import click

from kvq.errors import UsageError
from kvq.units import parse_seconds
from kvq_producer import options
from kvq_producer.options import Reach, accepted


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:9640",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve; anybody who reaches it can read it.",
)
@click.option(
    "--store",
    "-s",
    "stores",
    envvar="KVQ_STORE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Count the files of this store (repeatable).  [KVQ_STORE]",
)
@click.option(
    "--count-every",
    type=accepted(parse_seconds),
    default="10m",
    show_default=True,
    metavar="DURATION",
    help="Pause between two counts of a store's files.",
)
@click.option("--once", is_flag=True, help="Print the figures and end.")
@options.redis_url
@options.queue
def metrics(
    listen: str,
    stores: tuple[Path, ...],
    count_every: float,
    once: bool,
    redis_url: str | None,
    queue: str | None,
) -> None:
    """Serve figures of the queue and of stores for Prometheus, at /metrics, until stopped.

    A scrape asks Redis anew; a store's files are counted in the background, now and then.
    """
    from prometheus_client import generate_latest, start_http_server

    from kvq.queue.connection import find_url
    from kvq_producer.metrics.collect import KvqCollector, registry
    from kvq_producer.metrics.files import StoreFigures

    settings = Reach(redis_url=redis_url, queue=queue).settings
    figures = [StoreFigures(path.absolute(), count_every) for path in stores]
    url = find_url(settings.redis_url)
    served = registry(KvqCollector(url, [settings.queue], figures, version("kvq")))
    if once:
        for one in figures:
            one.count()
        click.echo(generate_latest(served).decode(), nl=False)
        return
    host, port = _address(listen)
    try:
        server, thread = start_http_server(port, addr=host, registry=served)
    except OSError as error:
        raise UsageError(f"cannot listen on {listen}: {error.strerror or error}") from error
    click.echo(f"kvq: serving http://{host}:{server.server_port}/metrics", err=True)
    try:
        threading.Event().wait()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is not HOST:PORT", param_hint="--listen")
    return host.strip("[]") or "127.0.0.1", int(port)
