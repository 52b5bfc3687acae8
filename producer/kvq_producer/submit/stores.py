"""Which store a command can look into from here, and what workers are told of it."""

from __future__ import annotations

from pathlib import Path

import click

from kvq.errors import StoreError, UsageError
from kvq.store.store import Store


def visible_store(named: str | None, *, create: bool) -> tuple[Path | None, str | None]:
    """The store named on the command line as it is seen here, and its path for the workers.

    The first is None where this machine does not see it: workers mount it elsewhere, perhaps.
    Raises StoreError when it is to be created and cannot be, UsageError when it has no name.
    """
    if named is None:
        if create:
            raise UsageError("--create-store needs --store")
        return None, None
    path = Path(named).expanduser().absolute()
    if create:
        Store.create(path)
        return path, str(path)
    try:
        Store(path)
    except StoreError as error:
        if path.exists():
            raise
        click.echo(
            f"kvq: {path} is not seen from here, so what is stored already is for the workers to "
            f"find ({type(error).__name__})",
            err=True,
        )
        return None, str(path)
    return path, str(path)
