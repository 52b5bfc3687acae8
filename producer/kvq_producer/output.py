"""Results as files, tables and exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvq.errors import UsageError
from kvq.queue.results import DEFAULT_MESSAGES, PromptResult, State
from kvq.units import format_bytes, format_seconds

#: Rows of the table; of a larger batch it shows the failures first.
_ROWS = 50


def console(*, error: bool = False) -> Console:
    """A console on standard output or error that writes plain text where that is no terminal."""
    stream = sys.stderr if error else sys.stdout
    terminal = stream.isatty()
    return Console(file=stream, width=None if terminal else 120, highlight=False, emoji=False)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """A file that appears at `path` once it is written whole; `-` is standard output.

    Raises UsageError when it cannot be written.
    """
    if str(path) == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    try:
        target = path.expanduser()
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_results(path: Path, results: Iterable[PromptResult]) -> None:
    """One JSON line for each result, in order."""
    with whole_file(path) as file:
        for one in results:
            file.write(json.dumps(one.line(), ensure_ascii=False) + "\n")


def results_table(results: Iterable[PromptResult]) -> Table:
    """What became of each prompt; of many, those that failed and then the first."""
    shown: list[PromptResult] = []
    rest = 0
    for one in results:
        if len(shown) < _ROWS:
            shown.append(one)
            continue
        rest += 1
        if one.state is not State.STORED:
            place = next((i for i, s in enumerate(shown) if s.state is State.STORED), None)
            if place is not None:
                del shown[place]
                shown.append(one)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("custom_id", "tokens", "reused", "bytes", "seconds", ""):
        table.add_column(name, justify="left" if name in ("custom_id", "") else "right")
    for one in shown:
        table.add_row(*_row(one))
    if rest:
        table.add_row(f"... {rest:,} more")
    return table


def _row(one: PromptResult) -> list[Text]:
    facts = one.facts
    cells = [printable(one.custom_id)[:60]]
    if one.state is not State.STORED:
        reason = printable(one.message or DEFAULT_MESSAGES[one.state])
        return [Text(cells[0]), *[Text("")] * 4, Text(f"{one.state}: {reason}", style="red")]
    cells += [f"{_number(facts.get(name)):,.0f}" for name in ("tokens", "reused_tokens")]
    cells += [format_bytes(_number(facts.get("bytes")))]
    cells += [format_seconds(_number(facts.get("seconds"))), printable(one.name or "")]
    return [Text(cell) for cell in cells]


def failures(results: Iterable[PromptResult]) -> int:
    """How many are not stored; each is named on standard error with its reason."""
    count = 0
    for one in results:
        if one.state is not State.STORED:
            count += 1
            reason = one.message or DEFAULT_MESSAGES[one.state]
            if count <= 20:
                click.echo(
                    f"kvq: {printable(one.custom_id)}: {one.state}: {printable(reason)}", err=True
                )
    if count > 20:
        click.echo(f"kvq: and {count - 20} more", err=True)
    return count


def printable(text: str) -> str:
    """`text` without what would steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
