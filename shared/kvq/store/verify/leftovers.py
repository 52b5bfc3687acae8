"""What processes that were killed, sweeps and damaged files have left in a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvq.store import layout
from kvq.store.census import Node, loose_files, nodes, scan
from kvq.store.disk import UNREADABLE
from kvq.store.verify.report import Finding, Severity

SWEEP = "`kvq gc` removes it"
#: What is younger (seconds) may belong to a job that still runs.
YOUNG = 3600.0


def leftovers(store: Path, now: float) -> Iterator[Finding]:
    """Unfinished files, old checkpoints, records without a block, and files of others.

    `now` is seconds since 1970. Raises OSError.
    """
    old = now - YOUNG
    for node in nodes(store):
        for entry in (*node.temps, *node.aside):
            if entry.ctime < old:
                yield _left(store, entry.path)
        yield from _of_blocks(store, node, old)
        for path in node.foreign:
            what, advice = "not a file of kvq's", "remove it if you know it"
            yield Finding.at(store, path, Severity.NOTE, what, advice)
    for entry in loose_files(store):
        if entry.ctime < old:
            yield _left(store, entry.path)


def quarantined(store: Path) -> Iterator[Finding]:
    """Every file in quarantine, with the reason. Raises OSError."""
    folder = layout.quarantine_dir(store)
    names = {name for name, _ in scan(folder)}
    for name in sorted(names):
        if name.endswith(".json") and name.removesuffix(".json") in names:
            continue  # the reason of another
        reason = "put aside, nobody knows why"
        try:
            note = json.loads(layout.quarantine_note(folder / name).read_bytes())
            reason = f"put aside from {note['file']}: {note['reason']}"
        except (OSError, *UNREADABLE):
            pass
        advice = "remove it when you know why; many of them speak of a failing disk"
        yield Finding.at(store, folder / name, Severity.NOTE, reason, advice)


def _of_blocks(store: Path, node: Node, old: float) -> Iterator[Finding]:
    for block, files in node.blocks.items():
        if any(file.mtime >= old for file in files):
            continue
        if all(file.record != "kv" for file in files):
            what = f"records of the block {block.stem} without its rows"
            yield Finding.at(store, files[0].path, Severity.WARNING, what, SWEEP)
        for file in files:
            if file.checkpoint:
                what = "a checkpoint of a job that has ended"
                yield Finding.at(store, file.path, Severity.NOTE, what, SWEEP)


def _left(store: Path, path: Path) -> Finding:
    return Finding.at(store, path, Severity.NOTE, "left by a process that was killed", SWEEP)
