"""`kvq why`: why a prompt resumes where it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq_producer import options

if TYPE_CHECKING:
    from kvq.store.why import Why


@click.command()
@options.store
@click.option("--model", "-m", required=True, help="Model folder or hub id.")
@click.option("--adapter", help="Folder of a LoRA adapter.")
@options.asked_options
@options.codecs("Only spaces of this codec (repeatable).")
@options.as_json
def why(
    store: str,
    model: str,
    adapter: str | None,
    codecs: tuple[str, ...],
    as_json: bool,
    **prompt: Any,
) -> None:
    """Say how much of a prompt the store can resume, and why it is not more.

    For each space of the model: the match, and the first token that differs, with the text on
    both sides; then other models that hold the same ids. Nothing is loaded, nothing is changed.
    """
    from kvq.model.fingerprint import fingerprint
    from kvq.model.folder import resolve
    from kvq.store.store import Store
    from kvq.store.why import why as explain
    from kvq_producer.asked import Asked, decoder

    asked = Asked(**prompt)
    asked.check()
    opened = Store(store)
    folder = resolve(model)
    ids = asked.ids(folder)
    digest = fingerprint(folder, adapter)
    found = explain(opened, digest, ids, codecs=codecs or None, decode=decoder(folder))
    if as_json:
        facts = {"store": str(opened.path), "model": model, **found.as_json()}
        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        _say(found, opened.path)


def _say(found: Why, store: Path) -> None:
    from kvq_producer.output import printable

    click.echo(f"{found.tokens:,} of {found.asked_tokens:,} tokens can be resumed from {store}")
    if not found.spaces:
        click.echo(f"  {printable(found.message)}")
    for one in found.spaces:
        logits = ", with the logits after them" if one.exact else ""
        limit = f", at most {one.max_kv_size} tokens kept" if one.max_kv_size else ""
        click.echo(f"\n{one.codec} {one.dtype}{limit} (space {one.space[:12]})")
        click.echo(f"  {one.tokens:,} tokens{logits}: {printable(one.reason.message)}")
        for reason in one.quarantined:
            click.echo(f"  in quarantine: {printable(reason)}")
        if one.difference is not None:
            _say_difference(one.difference)
    for other in found.others:
        name = ", ".join(map(printable, other.models)) or "a model"
        click.echo(
            f"\nanother model, {name} (fingerprint {other.fingerprint[:12]}), has the first "
            f"{other.shared_tokens:,} of these tokens in {other.codec}; its caches do not fit this "
            "model"
        )


def _say_difference(difference: Any) -> None:
    rows = (
        ("before", difference.before),
        ("stored", difference.stored),
        ("asked", difference.asked),
    )
    more = difference.siblings - 1
    click.echo(f"  at token {difference.position}, counted from 0:")
    for word, tokens in rows:
        if not tokens.ids:
            text = "the prompt begins here" if word == "before" else "cannot be read"
        else:
            shown = "" if tokens.text is None else f"{tokens.text!r}  "
            text = f"{shown}{' '.join(map(str, tokens.ids))}"
        others = f"  (and {more} more)" if word == "stored" and more else ""
        click.echo(f"    {word:<7} {text}{others}")
