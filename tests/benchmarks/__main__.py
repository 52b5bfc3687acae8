"""The benchmarks by name."""

from __future__ import annotations

import click
from benchmarks.shapes import SHAPES


@click.group()
def main() -> None:
    """Time kvq beside what one would use instead, in one run; ratios are what counts."""


_shape = click.option("--shape", type=click.Choice(list(SHAPES)), default="gemma3-270m")
_tokens = click.option("--tokens", default=2048, show_default=True)
_runs = click.option("--runs", default=3, show_default=True, help="Counted runs of each way.")
_folder = click.option("--folder", help="Where to put the files (default: the temp folder).")
_codec = click.option("--codec", type=click.Choice(["raw", "q8", "q4"]), default="raw")


@main.command()
@_shape
@_tokens
@_codec
@_runs
@_folder
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before each run.")
def restore(
    shape: str, tokens: int, codec: str, runs: int, folder: str | None, cold: bool
) -> None:
    """Disk to evaluated caches, against stock load and bare reads."""
    from benchmarks.restore import run

    run(shape, tokens, codec=codec, runs=runs, folder=folder, cold=cold)


@main.command("prefill-overhead")
@_shape
@_tokens
@_codec
@_runs
@_folder
@click.option("--step", default=2048, show_default=True, help="Tokens in a chunk.")
def prefill_overhead(
    shape: str, tokens: int, codec: str, runs: int, folder: str | None, step: int
) -> None:
    """A whole job with its files on the disk, against the bare prefill."""
    from benchmarks.save import run

    run(shape, tokens, codec=codec, runs=runs, folder=folder, step=step)


if __name__ == "__main__":
    main()
