"""`kvq plan`: what a file of prompts would cost and save, before anything is submitted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.errors import KvqError, UsageError
from kvq.units import parse_bytes
from kvq_producer.options import accepted, as_json, prompts_options

if TYPE_CHECKING:
    from kvq.store.keys import TokenIds
    from kvq_producer.plan import Group, Plan
    from kvq_producer.sizes import CacheShape

#: Lengths (tokens) of the caches in the table of sizes.
_LENGTHS = (4096, 8192, 32768)


def _bytes_per_second(text: str) -> int:
    count = parse_bytes(text.removesuffix("/s"))
    if not count:
        raise ValueError("a disk that reads nothing: give a rate such as 1.1G")
    return count


@click.command()
@prompts_options
@click.option(
    "--store",
    "-s",
    envvar="KVQ_STORE",
    type=click.Path(path_type=Path),
    help="Leave out what this store has already.  [KVQ_STORE]",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TOKENS/S",
    help="How fast one worker prefills; else as measured by the caches in the store.",
)
@click.option(
    "--disk-rate",
    type=accepted(_bytes_per_second),
    metavar="BYTES/S",
    help="How fast an app reads the store, such as 1.1G.  [2.5G]",
)
@click.option("--tree", is_flag=True, help="Draw the tree of shared prefixes.")
@click.option(
    "--depth", type=click.IntRange(1), default=4, show_default=True, help="Levels of the tree."
)
@click.option(
    "--breadth", type=click.IntRange(1), default=5, show_default=True, help="Branches of each."
)
@as_json
def plan(
    prompts: str | None,
    model: str | None,
    adapter: str | None,
    store: Path | None,
    rate: float | None,
    disk_rate: int | None,
    tree: bool,
    depth: int,
    breadth: int,
    as_json: bool,
    skip_invalid: bool,
    **wish: Any,
) -> None:
    """Show what a file of prompts would cost and save, and submit nothing.

    Takes what `kvq submit` takes. Without a file, shows how many bytes the caches of --model take.
    """
    if prompts is None:
        _show_sizes(model, as_json)
        return
    from kvq_producer.plan.estimate import DISK_RATE, Keeping, measured_rate
    from kvq_producer.plan.report import Report
    from kvq_producer.submit.intake import take_in
    from kvq_producer.submit.wish import Wish

    wanted = Wish(model=model, adapter=adapter, **wish)
    intake = take_in(prompts, wanted, store=store, skip_invalid=skip_invalid)
    with intake.plan as planned:
        measured = None
        if store is not None and rate is None:
            from kvq.store.store import Store

            models = (one.group.model for one in planned.groups)
            measured = measured_rate(Store(store).manifests(), models)
        report = Report(
            plan=planned,
            shapes=_shapes(one.group for one in planned.groups),
            rate=rate or measured,
            measured=rate is None,
            disk_rate=disk_rate or DISK_RATE,
            keeping=Keeping(
                all_windows=wanted.window_records == "all",
                keep_every=wanted.keep_every,
                positions={name: one.keep for name, one in intake.wanted.items() if one.keep},
            ),
        )
        for warning in intake.warnings:
            click.echo(f"kvq: {warning}", err=True)
        if as_json:
            facts = report.as_json()
            if tree:
                facts["tree"] = _jobs(planned)
            click.echo(json.dumps(facts))
            return
        from rich.console import Console

        console = Console()
        console.print(report.render())
        if tree:
            from kvq_producer.plan.draw import draw

            for drawn in draw(planned, _Words(), depth=depth, breadth=breadth):
                console.print()
                console.print(drawn)


# `kvq plan --model NAME` alone shows sizes.
next(one for one in plan.params if one.name == "prompts").required = False


def _show_sizes(model: str | None, as_json: bool) -> None:
    from kvq_producer.plan.report import sizes_json, sizes_table

    if model is None:
        raise UsageError("give a file of prompts, or --model alone for the sizes of its caches")
    shape = _shape(model)
    if as_json:
        click.echo(json.dumps({"model": model, "codecs": sizes_json(shape, _LENGTHS)}))
        return
    from rich.console import Console

    Console().print(sizes_table(shape, _LENGTHS))


def _shapes(groups: Iterable[Group]) -> dict[Group, CacheShape]:
    """The shapes of the caches of those groups whose model's config tells."""
    found = {}
    for group in groups:
        try:
            found[group] = _shape(group.model)
        except KvqError as error:
            click.echo(f"kvq: {group.model}: bytes are not known: {error}", err=True)
    return found


def _shape(model: str) -> CacheShape:
    from kvq.model.folder import read_config, resolve
    from kvq_producer.sizes import shape_of

    return shape_of(read_config(resolve(model, weights=False)))


def _jobs(planned: Plan) -> list[dict[str, Any]]:
    """The jobs in the order in which they are submitted, `parent` being a place in the list."""
    return [
        {
            "kind": job.kind,
            "key": job.key.hex(),
            "model": job.group.model,
            "codec": job.group.codec,
            "tokens": job.tokens,
            "prefill_tokens": job.prefill_tokens,
            "parent": job.parent,
            "keep": job.keep,
            "custom_ids": job.custom_ids,
            "serves": job.serves,
        }
        for job in planned.jobs
    ]


class _Words:
    """Decodes with each model's tokenizer; gives no words for a model that has none here."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Any] = {}

    def __call__(self, group: Group, ids: TokenIds) -> str:
        if group.model not in self._tokenizers:
            self._tokenizers[group.model] = _tokenizer(group.model)
        tokenizer = self._tokenizers[group.model]
        return str(tokenizer.decode(ids.tolist())) if tokenizer is not None else ""


def _tokenizer(model: str) -> Any:
    from kvq.model.folder import resolve
    from kvq.model.tokenizer import load_tokenizer

    try:
        return load_tokenizer(resolve(model, weights=False))
    except KvqError:
        return None
