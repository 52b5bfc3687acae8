"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from kvq.parsing import queue as parse_queue
from kvq.settings import Settings
from kvq.units import parse_seconds

Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")


def accepted(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """`parse` as the type of an option: what it refuses is a bad parameter, with its reason."""

    @wraps(parse)
    def convert(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return convert


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Which Redis and which queue a command works with."""

    redis_url: str | None
    queue: str | None

    @property
    def settings(self) -> Settings:
        return Settings.from_env(redis_url=self.redis_url, queue=self.queue)


redis_url = click.option(
    "--redis-url",
    metavar="URL",
    help="Redis or Valkey; else KVQ_REDIS_URL, RQ_REDIS_URL, REDIS_URL, else localhost.",
)
queue = click.option(
    "--queue",
    type=accepted(parse_queue),
    metavar="NAME",
    help="Name of the queue.  [KVQ_QUEUE, or kvq]",
)
export = click.option(
    "--export",
    metavar="DIR",
    callback=lambda ctx, param, value: None if value is None else _absolute(value),
    help="Also write each cache to DIR/NAME.safetensors, for apps that only know mlx-lm.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
output = click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    help="File for the results, one JSON line a prompt; - is standard output.",
)
store = click.option(
    "--store", "-s", envvar="KVQ_STORE", required=True, help="The store.  [KVQ_STORE]"
)
batch = click.argument("batch", required=False)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _json_object(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any]:
    if value is None:
        return {}
    try:
        found = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter("not a JSON object")
    return found


metadata = click.option(
    "--metadata", metavar="JSON", callback=_json_object, help="Kept with each cache."
)


def prompts_options(function: Function) -> Function:
    """The prompts file, and what is to become of its prompts: arguments of `Wish`."""
    for option in reversed(
        [
            click.argument("prompts", type=click.Path(path_type=str, allow_dash=True)),
            click.option("--model", "-m", help="Model folder or hub id, for lines that name none."),
            click.option("--adapter", help="Folder of a LoRA adapter."),
            click.option(
                "--codec",
                type=click.Choice(["raw", "q8", "q4", "auto"]),
                default="q8",
                show_default=True,
                help="How tensors rest on disk, for lines that name none.",
            ),
            click.option(
                "--max-kl",
                type=click.FloatRange(min=0, min_open=True),
                help="Loss above which a better codec is taken.",
            ),
            click.option(
                "--window-records",
                type=click.Choice(["kept", "all"]),
                default="kept",
                show_default=True,
                help="Keep sliding-window layers near kept positions, or everywhere.",
            ),
            click.option(
                "--keep-every",
                type=click.IntRange(1),
                metavar="TOKENS",
                help="Keep positions to resume from this often.",
            ),
            click.option(
                "--ttl",
                type=accepted(parse_seconds),
                metavar="DURATION",
                help="Lifetime of the caches, such as 30d.",
            ),
            click.option("--pin", is_flag=True, help="Never collect the caches."),
            metadata,
            click.option(
                "--skip-invalid", is_flag=True, help="Leave out the lines that have a fault."
            ),
        ]
    ):
        function = option(function)
    return function


def codecs(help: str) -> Callable[[Function], Function]:
    """`--codec`, any number of times: argument `codecs`."""
    return click.option(
        "--codec", "codecs", multiple=True, type=click.Choice(["raw", "q8", "q4"]), help=help
    )


def asked_options(function: Function) -> Function:
    """The one prompt of a command line, in one of several forms: arguments of `Asked`."""
    for option in reversed(
        [
            click.option("--prompt", "-p", help="The prompt, as text."),
            click.option(
                "--prompt-file", type=click.File("rb"), help="File with the prompt's text."
            ),
            click.option(
                "--messages",
                type=click.File("rb"),
                help="JSON file: chat messages, or these and tools.",
            ),
            click.option(
                "--stdin", "from_stdin", is_flag=True, help="Read the prompt's text from stdin."
            ),
            click.option(
                "--token-ids", type=click.File("rb"), help="JSON file: the list of token ids."
            ),
            click.option(
                "--chat-template-kwargs", metavar="JSON", help="Given to the chat template."
            ),
        ]
    ):
        function = option(function)
    return function
