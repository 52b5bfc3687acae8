"""Publishing a file so that readers see all of it or nothing, and naming what went wrong.

Each file is written under a unique temporary name in its own directory, flushed, then renamed.
No locks: two writers of one name write the same thing, and either rename is right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvq.errors import StoreUnavailable

#: Only macOS has it.
F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)

#: Temporary files begin with this; a sweep may remove those that are older than its grace period.
TEMP_PREFIX = ".tmp-"
#: Files hold prompts, so only their owner may read them, unless the store is opened to a group.
FILE_MODE = 0o600
DIR_MODE = 0o700

#: What parsing a file of another's making can raise.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)

_WHAT_TO_DO = {
    errno.ENOSPC: "the disk is full: free space or run `kvq gc`",
    errno.EDQUOT: "the quota is used up: free space or run `kvq gc`",
    errno.EROFS: "the file system is read-only: remount it for writing",
    errno.EACCES: "permission denied: check the owner and mode of the store",
    errno.EPERM: "permission denied: check the owner and mode of the store",
    errno.ENOENT: "it is gone: is the share still mounted?",
    errno.ESTALE: "the share was unmounted or replaced: mount it again",
    errno.EIO: "the disk or the network share reports an error",
}
#: What file systems without hard links say.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@contextlib.contextmanager
def store_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Map an OSError inside the block to StoreUnavailable, which says what to do."""
    try:
        yield
    except OSError as error:
        raise unavailable(error, path) from error


def unavailable(error: OSError, path: str | os.PathLike[str]) -> StoreUnavailable:
    """What to raise for `error` about `path`."""
    advice = _WHAT_TO_DO.get(error.errno or 0, error.strerror or str(error))
    return StoreUnavailable(f"{error.filename or os.fspath(path)}: {advice}")


@contextlib.contextmanager
def open_to_read(path: Path) -> Iterator[int]:
    """A descriptor of the file `path`, closed at the end of the block.

    On NFS a file that another machine removed meanwhile is stale: that is FileNotFoundError too.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise FileNotFoundError(errno.ENOENT, "removed while it was read", str(path)) from error
        raise


def publish(
    path: Path,
    parts: Sequence[bytes | memoryview],
    *,
    durable: bool = True,
    exclusive: bool = False,
) -> int:
    """Write `parts` one after the other as the file `path`; returns its size in bytes.

    With `durable`, the bytes are on the disk before the name is; the name itself is after
    `flush_directory`. Raises OSError, FileExistsError when `exclusive` and the name is taken;
    nothing is left behind then.
    """
    temp = path.with_name(f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}{path.suffix}")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            if rights := _group_rights(path.parent) & 0o060:
                os.fchmod(fd, FILE_MODE | rights)
            size = _write_all(fd, parts)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        if exclusive:
            move_to_free_name(temp, path)
        else:
            os.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    return size


def move_to_free_name(source: Path, target: Path) -> None:
    """Rename `source` to `target` unless that name is taken: FileExistsError. Raises OSError."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Some network shares have no hard links: the next best is to look first.
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        os.rename(source, target)
    else:
        os.unlink(source)


def flush_directory(path: Path) -> None:
    """Make the names in the directory `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse it and need none
            os.fsync(fd)
    finally:
        os.close(fd)


def flush_device(path: Path) -> None:
    """Empty the drive's own write cache (macOS, where fsync does not; elsewhere nothing)."""
    if F_FULLFSYNC is None:
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, F_FULLFSYNC)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create `path` and its parents, each for its owner only, or for the group of the one above."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=DIR_MODE)
            if rights := _group_rights(directory.parent):
                directory.chmod(DIR_MODE | rights | stat.S_ISGID)


def _group_rights(directory: Path) -> int:
    """What a group may do with things made in `directory`: nothing, unless it is set-group-ID.

    So `chmod 2770 STORE` opens a store to the folder's group, and no umask or habit does.
    """
    mode = directory.stat().st_mode
    return mode & 0o070 if mode & stat.S_ISGID else 0


def _write_all(fd: int, parts: Sequence[bytes | memoryview]) -> int:
    total = 0
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            # 64 MiB a call: some file systems refuse more than 2 GiB at once.
            done = os.write(fd, view[: 1 << 26])
            total += done
            view = view[done:]
    return total
