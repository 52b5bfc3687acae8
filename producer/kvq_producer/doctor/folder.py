"""The store as a folder: there, of a known format, the right one, writable, with room, private."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from kvq.errors import DamagedFile, StoreError, StoreNotFound, UnsupportedFormat
from kvq.queue import keys
from kvq.store import layout
from kvq.store.store import Store
from kvq.units import format_bytes
from kvq_producer.doctor.finding import Result, broken, fine, note, warning
from kvq_producer.doctor.machine import Machine, Role
from kvq_producer.doctor.mounts import empty_mount_point, mount_of

#: Share of a disk, and bytes, below which room is short.
_LITTLE, _LITTLE_BYTES = 0.05, 20_000_000_000
_SPOOL_ROOM = 1_000_000_000


def opened(path: Path) -> Store | None:
    """The store, None when it cannot be opened."""
    try:
        return Store(path)
    except StoreError:
        return None


def check_store(machine: Machine) -> Result | None:
    """It can be opened, and is of a format that this kvq reads."""
    path = machine.store
    if path is None:
        if machine.role is Role.WORKER:
            return note(
                "KVQ_STORE is not set: this worker writes to whatever store a job names",
                "set KVQ_STORE to the one store that it is for",
            )
        return note("no store is named, so none is examined", "kvq doctor --store DIR")
    try:
        store = Store(path)
    except UnsupportedFormat as error:
        return broken(str(error), "upgrade kvq on this machine")
    except DamagedFile as error:
        return broken(
            f"{error.path} cannot be read: {error.reason}",
            'restore it: {"format": 1, "block": 256, "id": any 16 hex digits}',
        )
    except StoreNotFound:
        return broken(
            f"{path} is not a kvq store",
            "mount the share; a new store is made by `kvq submit --create-store`",
        )
    except StoreError as error:
        return broken(str(error), "check the mount and the rights")
    return fine(f"{path} is a kvq store (id {store.id}, format 1)")


def check_mount(machine: Machine) -> Result | None:
    """A share that is to be mounted there is, so that nothing goes to the disk below it."""
    path = machine.store
    if path is None:
        return None
    point = empty_mount_point(path, fstab=machine.fstab, platform=machine.platform)
    if point is not None:
        return broken(
            f"nothing is mounted at {point}: {path} is on this machine's own disk",
            f"mount {point}, and move away what was written below it",
        )
    mount = mount_of(path)
    if mount is None:
        return None
    kind = f"on {mount.kind} at {mount.point}"
    if mount.kind in ("nfs", "nfs4") and "soft" in mount.options.split(","):
        return warning(
            f"the store is {kind} with `soft`: writes can fail silently while the server is away",
            "mount it with `hard`",
        )
    return fine(f"the store is {kind}")


def check_identity(machine: Machine) -> Result | None:
    """The store here is the one that the workers of the queue write to."""
    store = opened(machine.store) if machine.store is not None else None
    if store is None or machine.redis is None:
        return None
    names = machine.redis.smembers(f"{keys.WORKERS}:{machine.settings.queue}")
    found = {machine.redis.hget(name, "kvq_store") for name in names}
    ids = {one.decode("utf-8", "replace") for one in found if one}
    if not ids:
        return None
    if store.id not in ids:
        return broken(
            f"another store is mounted at {store.path} (id {store.id}): the workers write to "
            f"{', '.join(sorted(ids))}",
            "mount the workers' store here, or point this machine at another queue",
        )
    return fine("the workers write to this very store")


def check_access(machine: Machine) -> Result | None:
    """Files can be made in it."""
    path = machine.store
    if path is None or opened(path) is None:
        return None
    try:
        handle, name = tempfile.mkstemp(prefix=".kvq-probe-", dir=path)
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        message = f"{path} cannot be written to: {error.strerror}"
        if machine.role is Role.WORKER:
            return broken(message, "mount it for writing, and give this user the folder")
        return note(message, "nothing, if this machine only reads")
    return fine("the store can be written to")


def check_space(machine: Machine) -> Result | None:
    """Free space."""
    path = machine.store
    if path is None or opened(path) is None:
        return None
    usage, least = shutil.disk_usage(path), machine.settings.min_free
    free = format_bytes(usage.free)
    if usage.free < least:
        return broken(
            f"{free} free in the store, less than KVQ_MIN_FREE ({format_bytes(least)}): workers "
            "take no jobs",
            "free space, or `kvq gc`",
        )
    if usage.free < min(_LITTLE * usage.total, _LITTLE_BYTES):
        return warning(f"{free} free in the store", "free space, or `kvq gc`")
    return fine(f"{free} of {format_bytes(usage.total)} free in the store")


def check_privacy(machine: Machine) -> Result | None:
    """Caches hold prompts: nobody but the owner and a group reads them."""
    path = machine.store
    if path is None or opened(path) is None:
        return None
    open_to_all = [
        one
        for one in (layout.caches_dir(path), layout.spaces_dir(path))
        if one.is_dir() and path.stat().st_mode & 0o005 and one.stat().st_mode & 0o005
    ]
    if open_to_all:
        return warning(
            f"everybody on this machine can read {open_to_all[0]}, and caches hold prompts",
            f"chmod -R o-rwx {path}",
        )
    return fine("only the owner and a group can read the store")


def check_spool(machine: Machine) -> Result:
    """Room for a batch's token ids, 4 bytes each, while it is planned."""
    folder = Path(machine.environment.get("TMPDIR") or tempfile.gettempdir())
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return broken(f"TMPDIR {folder}: {error.strerror}", "point TMPDIR at a folder")
    if free < _SPOOL_ROOM:
        return warning(
            f"{format_bytes(free)} free in {folder}, where a batch's token ids wait (4 bytes each)",
            "free space there, or point TMPDIR elsewhere",
        )
    return fine(f"{format_bytes(free)} free in {folder} for planning")
