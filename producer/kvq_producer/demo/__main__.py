"""`python -m kvq_producer.demo DIR`: prepare the demo model folder."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvq.errors import KvqError
from kvq_producer.demo.preparation import prepare
from kvq_producer.demo.weights import DTYPES


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Type of the weights; bfloat16 on macOS and float32 elsewhere unless given.",
)
def main(folder: Path, dtype: str | None) -> None:
    """Prepare the demo model, Gemma 3 270M, in FOLDER. Does nothing when it is already there."""
    try:
        prepare(folder, dtype, say=lambda line: click.echo(line, err=True))
    except KvqError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_status)
    except OSError as error:
        click.echo(f"error: cannot prepare {folder}: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
