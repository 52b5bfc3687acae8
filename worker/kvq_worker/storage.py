"""The store that a job writes to, and whether this machine can write to it at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from kvq.errors import InvalidMessage, StoreError, StoreNotFound, StoreUnavailable
from kvq.settings import Settings
from kvq.store.store import Store
from kvq.units import format_bytes

#: Exit status of a worker that cannot use its store: worth trying again later (EX_TEMPFAIL).
STORE_EXIT_STATUS = 75


class Stores:
    """The stores of this process. Which one a job may write to is the operator's to say."""

    def __init__(self, settings: Settings) -> None:
        self._own = settings.store
        self._min_free = settings.min_free
        self._known: dict[Path, Store] = {}

    def check_own(self) -> None:
        """Raise StoreError unless KVQ_STORE, where it is set, can be written to."""
        if self._own is not None:
            _check_writable(self._opened(self._own), self._min_free)

    @property
    def own_id(self) -> str:
        """Identity of the worker's own store; empty without one, and before it was opened."""
        store = self._known.get(self._own) if self._own is not None else None
        return store.id if store is not None else ""

    def find(self, wanted: str | None) -> Store:
        """The store that a job wants, None for the worker's own, ready to be written to.

        Raises InvalidMessage when this worker writes to another one. Raises StoreUnavailable when
        the worker's own store, or one that it has used, is gone, full or read-only: a fault of this
        machine. Any other store that cannot be opened is the job's fault: StoreNotFound.
        """
        if wanted is None and self._own is None:
            raise InvalidMessage(
                "the job names no store and this worker has none of its own: "
                "set KVQ_STORE, or submit with --store"
            )
        path = self._own or Path(wanted or "").absolute()
        if wanted is not None and Path(wanted).resolve() != path.resolve():
            raise InvalidMessage(f"this worker writes to {self._own} only, not to {wanted}")
        ours = path in self._known or path == self._own
        try:
            store = self._opened(path)
            store.check()
        except StoreError as error:
            kind = StoreUnavailable if ours else StoreNotFound
            raise kind(str(error)) from error
        _check_room(store, self._min_free)
        return store

    def _opened(self, path: Path) -> Store:
        if path not in self._known:
            self._known[path] = Store(path)
        return self._known[path]


def _check_room(store: Store, min_free: int) -> None:
    try:
        free = shutil.disk_usage(store.path).free
    except OSError as error:
        raise StoreUnavailable(f"{store.path}: {error.strerror}") from error
    if free < min_free:
        raise StoreUnavailable(
            f"{store.path} has {format_bytes(free)} free, less than KVQ_MIN_FREE "
            f"({format_bytes(min_free)}): make room there"
        )


def _check_writable(store: Store, min_free: int) -> None:
    store.check()
    _check_room(store, min_free)
    try:
        handle, name = tempfile.mkstemp(prefix=".kvq-probe-", dir=store.path)
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        raise StoreUnavailable(
            f"{store.path} cannot be written to ({error.strerror}): check the mount and the rights"
        ) from error
