"""How the store's file system behaves, tried out in a folder of its own that is removed again.

What a store needs of one: a rename that replaces, seen whole by all; an fsync that means it; names
that differ by case only; times that are near ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvq.store.disk import FILE_MODE
from kvq.units import format_seconds
from kvq_producer.doctor.finding import Result, broken, fine, note, warning
from kvq_producer.doctor.folder import opened
from kvq_producer.doctor.machine import Machine

#: Seconds that the file server's clock may differ: a sweep spares files younger than its grace.
_SKEW_NOTED, _SKEW_BROKEN = 5.0, 600.0
_OLD, _NEW = b"old", b"new and longer"


@contextlib.contextmanager
def trial_folder(machine: Machine) -> Iterator[Path | None]:
    """A folder in the store to try things in; None when there is no store to write to."""
    path = machine.store
    if path is None or opened(path) is None:
        yield None
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix=".kvq-probe-", dir=path))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_rename(machine: Machine) -> Result | None:
    """A rename replaces a file at once and whole, also for one who has the old one open."""
    with trial_folder(machine) as folder:
        if folder is None:
            return None
        try:
            return _try_rename(folder)
        except OSError as error:
            return broken(
                f"renaming a file in the store fails: {error.strerror}",
                "put the store on a file system with POSIX renames (see deploy/README.md)",
            )


def _try_rename(folder: Path) -> Result:
    target, source = folder / "target", folder / "source"
    _write(target, _OLD)
    _write(source, _NEW)
    reader = os.open(target, os.O_RDONLY)
    try:
        os.rename(source, target)
        if target.read_bytes() != _NEW or source.exists():
            return broken(
                "a rename in the store does not replace a file in one step",
                "put the store on a file system with POSIX renames (see deploy/README.md)",
            )
        try:
            still = os.pread(reader, 100, 0)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            still = b""
    finally:
        os.close(reader)
    if still not in (_OLD, b""):
        return broken(
            "who reads a file while it is replaced reads a mixture",
            "put the store on a file system with POSIX renames (see deploy/README.md)",
        )
    try:
        os.link(target, source)
    except OSError:
        return note("renames replace whole; there are no hard links, so two renames of one cache "
                    "to one new name at the same moment may both seem to succeed")  # fmt: skip
    return fine("renames replace files whole")


def check_fsync(machine: Machine) -> Result | None:
    """Files can be flushed to the disk, and folders too."""
    with trial_folder(machine) as folder:
        if folder is None:
            return None
        file = folder / "file"
        _write(file, _NEW, flush=False)
        try:
            _flush(file)
        except OSError as error:
            return broken(
                f"fsync fails in the store ({error.strerror}): a power cut could lose what kvq "
                "says is stored",
                "put the store on a file system that flushes (see deploy/README.md)",
            )
        try:
            _flush(folder)
        except OSError as error:
            return note(f"folders cannot be flushed here ({error.strerror}); network shares "
                        "do that themselves")  # fmt: skip
        return fine("files and folders can be flushed")


def check_names(machine: Machine) -> Result | None:
    """Names that differ by case only are two files."""
    with trial_folder(machine) as folder:
        if folder is None:
            return None
        _write(folder / "case", _OLD)
        if (folder / "CASE").exists():
            return warning(
                "file names differ by more than case only here: the caches `a` and `A` are one",
                "name caches in lower case, or put the store on a case-sensitive volume",
            )
        return fine("file names are case-sensitive")


def check_file_times(machine: Machine) -> Result | None:
    """The file server's clock against this machine's."""
    with trial_folder(machine) as folder:
        if folder is None:
            return None
        before = machine.clock()
        _write(folder / "file", _NEW)
        skew = (folder / "file").stat().st_mtime - before
        if abs(skew) <= _SKEW_NOTED:
            return fine("the store's file times agree with this machine's clock")
        side = "ahead of" if skew > 0 else "behind"
        message = f"the store's clock is {format_seconds(abs(skew))} {side} this machine's"
        mend = "synchronize both by NTP; `kvq gc` goes by the age of files"
        return broken(message, mend) if abs(skew) > _SKEW_BROKEN else warning(message, mend)


def check_modes(machine: Machine) -> Result | None:
    """A file made for its owner alone is its owner's alone."""
    with trial_folder(machine) as folder:
        if folder is None:
            return None
        _write(folder / "file", _NEW)
        mode = (folder / "file").stat().st_mode & 0o777
        if mode & 0o077:
            return warning(
                f"the file system ignores modes (0600 became {mode:04o}): others on this machine "
                "may read caches, which hold prompts",
                "mount the share with its own file and folder modes (see deploy/README.md)",
            )
        return fine("new files are readable by their owner only")


def _write(path: Path, data: bytes, *, flush: bool = True) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    try:
        os.write(descriptor, data)
        if flush:
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
