"""Caches as the commands show them, and the question before many are changed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from kvq.errors import UsageError
from kvq.store.footprint import File, Footprint
from kvq.store.layout import spaces_dir
from kvq.store.lifecycle import Manifests, choose, is_pattern, set_pinned
from kvq.store.listing import Row, is_expired
from kvq.store.manifest import Manifest
from kvq.store.store import Store
from kvq.units import format_bytes, format_seconds
from kvq_producer.output import printable

#: Names in a question; the rest are counted.
_NAMED = 10


def facts(manifest: Manifest, footprint: Footprint) -> dict[str, Any]:
    """What `ls` and `show` say of a cache in JSON. Times are seconds since 1970, sizes bytes."""
    found = asdict(manifest)
    del found["chain"], found["branches"]
    return {
        **found,
        "blocks": len(manifest.chain),
        "expired": is_expired(manifest, time.time()),
        "last_used": footprint.used,
        "disk_bytes": footprint.nbytes,
        "own_bytes": footprint.own_bytes,
        "shared_bytes": footprint.shared_bytes,
        "files": footprint.files,
        "missing_blocks": footprint.missing,
    }


def table(rows: Sequence[Row]) -> Table:
    """A line for each cache."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    right = {"tokens", "size", "own"}
    for name in ("name", "model", "codec", "tokens", "size", "own", "created", "used", ""):
        # Names are for copying: no cut, whatever the width.
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=True,
            overflow="fold" if name == "name" else "ellipsis",
        )
    now = time.time()
    for row in rows:
        one = row.manifest
        cells = [
            one.name,
            printable(one.model.rstrip("/").rpartition("/")[2]),
            printable(one.codec),
            f"{one.tokens:,}",
            format_bytes(row.footprint.nbytes),
            format_bytes(row.footprint.own_bytes),
            ago(one.created, now),
            ago(row.footprint.used, now),
            ", ".join(_marks(row, now)),
        ]
        made.add_row(*map(Text, cells))
    return made


def fields_table(manifest: Manifest, footprint: Footprint, space: Any) -> Table:
    """Every field of a manifest, with what is measured of it and of its space."""
    now = time.time()
    expires = "never" if manifest.expires is None else when(manifest.expires, now)
    sizes = f"{format_bytes(footprint.nbytes)} in {footprint.files} files"
    rows: list[tuple[str, str]] = [
        ("name", manifest.name),
        ("model", manifest.model),
        ("fingerprint", manifest.fingerprint),
        ("space", manifest.space + ("" if space is not None else " (its space.json is missing)")),
        ("codec", manifest.codec),
        ("dtype", manifest.dtype),
        ("tokens", f"{manifest.tokens:,}"),
        ("blocks", f"{len(manifest.chain)} and {len(manifest.branches)} beside them"),
        ("kept positions", " ".join(map(str, manifest.kept)) or "none"),
        ("on disk", f"{sizes}, {format_bytes(footprint.own_bytes)} of it for this alone"),
        ("read to restore", format_bytes(manifest.nbytes)),
        ("created", when(manifest.created, now)),
        ("last used", when(footprint.used, now)),
        ("expires", expires),
        ("pinned", "yes" if manifest.pinned else "no"),
        ("prefilled in", format_seconds(manifest.prefill_seconds)),
        ("reused tokens", f"{manifest.reused_tokens:,}"),
        ("lossy prefix", f"{manifest.lossy_prefix_tokens:,} tokens"),
        ("quality", _pairs(manifest.quality) or "not measured"),
        ("notes", "; ".join(manifest.notes) or "none"),
        ("worker", manifest.worker or "unknown"),
        ("metadata", _pairs(manifest.metadata) or "none"),
    ]
    if footprint.missing:
        rows.append(("missing", f"{footprint.missing} blocks: `kvq verify` says more"))
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(Text(name), Text(printable(value)))
    return made


def files_table(store: Store, files: Sequence[File]) -> Table:
    """A line for each file of a cache."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("tokens", justify="right", no_wrap=True)
    made.add_column("record", no_wrap=True)
    made.add_column("size", justify="right", no_wrap=True)
    made.add_column("file below spaces/", overflow="fold")
    for file in files:
        path = file.path.relative_to(spaces_dir(store.path))
        cells = (f"{file.start}-{file.end}", file.record, format_bytes(file.nbytes), str(path))
        made.add_row(*map(Text, cells))
    return made


def warn_unreadable(manifests: Manifests) -> None:
    """Name on standard error the manifests that cannot be read."""
    for reason in manifests.unreadable.values():
        click.echo(f"kvq: left out: {printable(reason)}", err=True)


def confirm(verb: str, given: Sequence[str], chosen: Sequence[str], *, yes: bool) -> None:
    """Ask before several caches, or those that a pattern found, are changed.

    Raises UsageError where there is nobody to ask, click.Abort when the answer is no.
    """
    if yes or (len(chosen) <= 1 and not any(map(is_pattern, given))):
        return
    count = "1 cache" if len(chosen) == 1 else f"{len(chosen)} caches"
    if not at_terminal():
        raise UsageError(f"this would {verb} {count}: add --yes if that is meant")
    for name in chosen[:_NAMED]:
        click.echo(f"  {name}", err=True)
    if len(chosen) > _NAMED:
        click.echo(f"  and {len(chosen) - _NAMED} more", err=True)
    click.confirm(f"{verb} {count}?", abort=True, err=True)


def at_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


def pin_caches(path: str, names: Sequence[str], *, pinned: bool, as_json: bool) -> None:
    """What `kvq pin` and `kvq unpin` do."""
    store = Store(path)
    changed = set_pinned(store, choose(store, names), pinned)
    if as_json:
        found = [{"name": one.name, "pinned": one.pinned} for one in changed]
        click.echo(json.dumps({"store": str(store.path), "caches": found}))
        return
    for one in changed:
        click.echo(f"{one.name}: {'pinned' if pinned else 'not pinned'}")


def ago(moment: float, now: float) -> str:
    """How long before `now` that was."""
    return f"{format_seconds(now - moment)} ago" if now - moment >= 1 else "now"


def when(moment: float, now: float) -> str:
    """A moment in local time, and how far it is from `now`."""
    try:
        local = datetime.fromtimestamp(moment).astimezone().isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return f"{moment:g} s after 1970"
    if moment > now:
        return f"{local} (in {format_seconds(moment - now)})"
    return f"{local} ({ago(moment, now)})"


def _marks(row: Row, now: float) -> list[str]:
    one = row.manifest
    marks = ["pinned"] if one.pinned else []
    if is_expired(one, now):
        marks.append("expired")
    elif one.expires is not None:
        marks.append(f"expires in {format_seconds(one.expires - now)}")
    if row.footprint.missing:
        marks.append(f"{row.footprint.missing} blocks missing")
    return marks


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in (values or {}).items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
