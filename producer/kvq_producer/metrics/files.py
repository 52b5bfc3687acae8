"""Figures of one store. Its files are counted now and then, in a thread: a share can be slow."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvq.errors import StoreError
from kvq.store import layout
from kvq.store.keys import ROOT
from kvq.store.store import Store
from kvq_producer.metrics import table
from kvq_producer.metrics.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Count:
    """Files and bytes by (kind, codec); `moment` is seconds since 1970, `seconds` what it took."""

    files: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    moment: float
    seconds: float


class StoreFigures:
    """Figures of the store at `path`, whose files are counted at most every `every` seconds."""

    def __init__(self, path: Path, every: float) -> None:
        self._path = path
        self._every = every
        self._lock = threading.Lock()
        self._counting: threading.Thread | None = None
        self._started = 0.0
        self._last: Count | None = None

    def samples(self) -> Iterator[Sample]:
        """The figures now; files as they were last counted."""
        labels = (str(self._path),)
        try:
            Store(self._path)
            usage = shutil.disk_usage(self._path)
        except (StoreError, OSError):
            yield Sample(metric=table.STORE_UP, labels=labels, value=0)
            return
        self._count_when_due()
        yield Sample(metric=table.STORE_UP, labels=labels, value=1)
        yield Sample(metric=table.STORE_FREE, labels=labels, value=usage.free)
        yield Sample(metric=table.STORE_SIZE, labels=labels, value=usage.total)
        last = self._last
        if last is not None:
            for name, value in last.bytes.items():
                yield Sample(metric=table.STORE_BYTES, labels=(*labels, *name), value=value)
            for name, value in last.files.items():
                yield Sample(metric=table.STORE_FILES, labels=(*labels, *name), value=value)
            yield Sample(metric=table.STORE_WALKED, labels=labels, value=last.moment)
            yield Sample(metric=table.STORE_WALK, labels=labels, value=last.seconds)

    def count(self) -> None:
        """Count the files now, and wait for it."""
        try:
            self._last = count_files(self._path)
        except (StoreError, OSError):
            return

    def _count_when_due(self) -> None:
        with self._lock:
            busy = self._counting is not None and self._counting.is_alive()
            due = not self._started or time.monotonic() - self._started >= self._every
            if busy or not due:
                return
            self._started = time.monotonic()
            self._counting = threading.Thread(target=self.count, name="kvq-count", daemon=True)
            self._counting.start()


def count_files(path: Path) -> Count:
    """Count the files of a store. What vanishes meanwhile is left out. Raises OSError."""
    started, moment = time.perf_counter(), time.time()
    files: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    codecs = {space.digest: space.codec for space in Store(path).spaces()}
    for kind, codec, size in _all_files(path, codecs):
        files[kind, codec] += 1
        sizes[kind, codec] += size
    took = time.perf_counter() - started
    return Count(files=files, bytes=sizes, moment=moment, seconds=took)


def _all_files(path: Path, codecs: dict[str, str]) -> Iterator[tuple[str, str, int]]:
    for _, size in _sizes(layout.caches_dir(path)):
        yield "manifest", "", size
    for _, size in _sizes(layout.quarantine_dir(path)):
        yield "quarantine", "", size
    for space in _subfolders(layout.spaces_dir(path)):
        codec = codecs.get(os.path.basename(space), "")
        for name, size in _sizes(space):
            parsed = layout.parse_name(ROOT, name)
            if parsed is None:
                yield "other", codec, size
            else:
                yield "checkpoint" if parsed.checkpoint else parsed.record, codec, size


def _sizes(folder: str | os.PathLike[str]) -> Iterator[tuple[str, int]]:
    """Name and size (bytes) of every file below `folder`."""
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        try:
                            yield entry.name, entry.stat(follow_symlinks=False).st_size
                        except FileNotFoundError:
                            continue
        except FileNotFoundError:
            continue


def _subfolders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []
