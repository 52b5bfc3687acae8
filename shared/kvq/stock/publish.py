"""Publishing one file: readers of its name see the old one or the new one, whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvq.errors import StoreUnavailable, UsageError

#: Only macOS has it; there, fsync stops at the drive's own cache.
_FULL_FSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)

#: Leftovers of a killed writer are removed once they are this old, in seconds.
_ABANDONED = 3600.0


@contextlib.contextmanager
def publishing(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; when the block ends it is on the disk under the name `path`.

    If the block raises, `path` is untouched and nothing is left behind. A symbolic link stays one:
    what it points to is replaced. Raises UsageError where the folder does not exist,
    StoreUnavailable where it cannot be written.
    """
    target = Path(os.path.realpath(path))
    # mlx-lm and MLX go by the suffix, so even the unfinished file has it.
    prefix = f".{target.name[:100]}.tmp-"
    temp = target.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(6)}.safetensors")
    try:
        with _removed_on_error(temp):
            with open(temp, "xb") as file:
                yield file
                file.flush()
                _flush(file.fileno())
            os.replace(temp, target)
        _flush_directory(target.parent)
        _sweep(target.parent, prefix)
    except FileNotFoundError as error:
        raise UsageError(f"{target.parent}: there is no such folder") from error
    except OSError as error:
        raise StoreUnavailable(f"{target}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _removed_on_error(temp: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise


def _flush(fd: int) -> None:
    os.fsync(fd)
    if _FULL_FSYNC is not None:
        with contextlib.suppress(OSError):  # network file systems have no drive to flush
            fcntl.fcntl(fd, _FULL_FSYNC)


def _flush_directory(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some network file systems refuse it and need none
        fd = os.open(folder, os.O_RDONLY)
        try:
            _flush(fd)
        finally:
            os.close(fd)


def _sweep(folder: Path, prefix: str) -> None:
    now = time.time()
    with contextlib.suppress(OSError):
        for leftover in folder.iterdir():
            if leftover.name.startswith(prefix) and now - leftover.stat().st_mtime > _ABANDONED:
                leftover.unlink()
