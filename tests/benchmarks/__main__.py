"""The benchmarks by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.shapes import SHAPES

_ROOT = Path(__file__).parents[2]
_COUNT = click.IntRange(min=1)
_RATE = click.FloatRange(min=0, min_open=True)


class _Several(click.ParamType):
    """Values of one type with commas between them, such as 1024,2048."""

    def __init__(self, one: click.ParamType) -> None:
        self.name = f"{one.name},..."
        self._one = one

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        return [self._one.convert(part, param, ctx) for part in value.split(",")]


_COUNTS = _Several(_COUNT)
_CODECS = _Several(click.Choice(["q8", "q4", "auto"]))


class _Sizes(click.ParamType):
    """A shape and numbers of tokens, such as gemma3-270m:1024,2048."""

    name = "sizes"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, list[int]]:
        shape, _, lengths = value.partition(":")
        if shape not in SHAPES or not lengths:
            self.fail(f"{value!r} is not like gemma3-270m:1024,2048 ({', '.join(SHAPES)})")
        return shape, _COUNTS.convert(lengths, param, ctx)


@click.group()
def main() -> None:
    """Time kvq beside what one would use instead, in one run; ratios are what counts."""


_shape = click.option("--shape", type=click.Choice(list(SHAPES)), default="gemma3-270m")
_tokens = click.option("--tokens", type=_COUNT, default=2048, show_default=True)
_runs = click.option(
    "--runs", type=_COUNT, default=3, show_default=True, help="Counted runs of each way."
)
_folder = click.option("--folder", help="Where to put the files (default: the temp folder).")
_codec = click.option("--codec", type=click.Choice(["raw", "q8", "q4"]), default="raw")


@main.command()
@_shape
@_tokens
@_codec
@_runs
@_folder
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before each run.")
def restore(shape: str, tokens: int, codec: str, runs: int, folder: str | None, cold: bool) -> None:
    """Disk to evaluated caches, against stock load and bare reads."""
    from benchmarks.restore import run

    run(shape, tokens, codec=codec, runs=runs, folder=folder, cold=cold)


@main.command("prefill-overhead")
@_shape
@_tokens
@_codec
@_runs
@_folder
@click.option("--step", type=_COUNT, default=2048, show_default=True, help="Tokens in a chunk.")
def prefill_overhead(
    shape: str, tokens: int, codec: str, runs: int, folder: str | None, step: int
) -> None:
    """A whole job with its files on the disk, against the bare prefill."""
    from benchmarks.save import run

    run(shape, tokens, codec=codec, runs=runs, folder=folder, step=step)


@main.command()
@_shape
@_tokens
@_codec
@_runs
@_folder
def save(shape: str, tokens: int, codec: str, runs: int, folder: str | None) -> None:
    """Publishing rows that cost nothing to compute, against stock save and the disk."""
    from benchmarks.save import run

    run(shape, tokens, codec=codec, runs=runs, folder=folder, step=2048, rows_only=True)


@main.command()
@click.option("--blocks", type=_COUNT, default=100_000, show_default=True)
@click.option("--tokens", type=_COUNT, default=32_768, show_default=True)
@click.option("--runs", type=_COUNT, default=20, show_default=True)
@_folder
def match(blocks: int, tokens: int, runs: int, folder: str | None) -> None:
    """Finding a prompt's longest stored prefix in a large store."""
    from benchmarks.match import run

    run(blocks, tokens, runs=runs, folder=folder)


_plot = click.option(
    "--plot", type=click.Path(path_type=Path), help="PNG to draw (needs matplotlib)."
)


@main.command("restore-plot")
@click.argument("sizes", nargs=-1, type=_Sizes())
@_codec
@_runs
@_folder
@click.option("--rows", type=click.Path(path_type=Path), help="JSON of the timings.")
@_plot
def restore_plot(
    sizes: tuple[tuple[str, list[int]], ...],
    codec: str,
    runs: int,
    folder: str | None,
    rows: Path | None,
    plot: Path | None,
) -> None:
    """Restore against stock by tokens; SIZES are like gemma3-270m:1024,2048.

    Without SIZES, what is in the file of --rows is drawn.
    """
    from benchmarks.restore_plot import run

    run(
        sizes,
        codec=codec,
        runs=runs,
        folder=folder,
        rows_file=rows,
        plot=plot,
    )


_model = click.option(
    "--model", default=str(_ROOT / ".demo" / "gemma-3-270m"), show_default="the demo model"
)
_text = click.option(
    "--text", type=click.Path(path_type=Path), default=_ROOT / "README.md", show_default="README.md"
)


@main.command()
@_model
@_codec
@_runs
@_text
@click.option("--lengths", type=_COUNTS, default="256,512,1024,2048,4096,8192", show_default=True)
@click.option(
    "--cold-seconds",
    type=_RATE,
    default=60.0,
    show_default=True,
    help="No cold run longer than it.",
)
@_plot
def ttft(
    model: str,
    codec: str,
    runs: int,
    text: Path,
    lengths: list[int],
    cold_seconds: float,
    plot: Path | None,
) -> None:
    """Time to the first token, cold and resumed."""
    from benchmarks.ttft import run

    run(
        model,
        lengths,
        codec=codec,
        runs=runs,
        text=text,
        cold_seconds=cold_seconds,
        plot=plot,
    )


@main.command("shared-prefix")
@_model
@_codec
@_text
@click.option("--prompts", type=_COUNT, default=100, show_default=True)
@click.option("--tokens", type=_COUNT, default=4096, show_default=True)
def shared_prefix(model: str, codec: str, text: Path, prompts: int, tokens: int) -> None:
    """Prompts that share nine tenths, against one prefill or one process for each."""
    from benchmarks.shared_prefix import run

    run(model, prompts, tokens, codec=codec, text=text)


@main.command()
@click.option("--prompts", type=_COUNT, default=100_000, show_default=True)
def plan(prompts: int) -> None:
    """Planning batches of several kinds: rate and memory."""
    from benchmarks.plan import run

    run(prompts)


@main.command()
@_model
@click.option("--prompts", type=_COUNT, default=60_000, show_default=True)
@click.option(
    "--tokens", type=_COUNT, default=256, show_default=True, help="Tokens of a prompt, about."
)
def submit(model: str, prompts: int, tokens: int) -> None:
    """From the file to the queue, beside RQ's own enqueue."""
    from benchmarks.submit import run

    run(model, prompts, tokens)


@main.command("queue-overhead")
@click.option("--jobs", type=_COUNT, default=1000, show_default=True)
def queue_overhead(jobs: int) -> None:
    """What the queue costs a job, with a worker that computes nothing."""
    from benchmarks.queue_overhead import run

    run(jobs)


@main.command()
@click.option(
    "--workers", type=_COUNTS, default="1,2,4,8,16", show_default=True, help="How many, in turn."
)
@click.option("--prompts", type=_COUNT, default=1000, show_default=True)
@click.option(
    "--rate", type=_RATE, default=1000.0, show_default=True, help="Tokens/s of a worker's prefill."
)
@click.option("--alone", type=_RATE, help="Seconds of one worker, where it was measured before.")
@_folder
def fleet(
    workers: list[int], prompts: int, rate: float, alone: float | None, folder: str | None
) -> None:
    """A batch on ever more workers, whose model sleeps in place of a large one."""
    from benchmarks.fleet import run

    run(workers, prompts, rate=rate, alone=alone, folder=folder)


@main.command()
@_model
@click.option("--tokens", type=_COUNT, default=4096, show_default=True)
@click.option("--codecs", type=_CODECS, default="q8,q4,auto", show_default=True)
@_runs
@_folder
def gate(model: str, tokens: int, codecs: list[str], runs: int, folder: str | None) -> None:
    """A whole job with its quality measured, against one without."""
    from benchmarks.gate import run

    run(model, tokens, codecs=codecs, runs=runs, folder=folder)


@main.command()
@_model
@click.option("--tokens", type=_COUNT, default=2048, show_default=True, help="Tokens of each text.")
@click.option(
    "--tail", type=_COUNT, default=256, show_default=True, help="Predictions compared in each."
)
@_plot
def quality(model: str, tokens: int, tail: int, plot: Path | None) -> None:
    """How far codecs move a model's predictions, beside mlx-lm's own quantized caches."""
    from benchmarks.quality import run

    run(model, tokens=tokens, tail=tail, plot=plot)


if __name__ == "__main__":
    main()
