"""Threads that put block files on the disk while the device computes. They run nothing of MLX's.

Durability: each kept file is flushed before it gets its name; the directories are flushed once, in
`finish`, before anyone writes a manifest that relies on them. A crash in between can lose names
of finished blocks, never show a half-written one. Checkpoint files are not flushed: they have to
outlive the process, not a power cut.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvq.store.blockfile import BlockMeta, Tensor, write_block
from kvq.store.disk import flush_directory, make_directory, store_errors
from kvq.store.store import Store

#: Bytes handed over and not yet written, above which `submit` waits for the disk.
MAX_WAITING_BYTES = 1 << 30

#: Files written at a time: a flush keeps a thread waiting, not a core.
THREADS = min(8, max(4, os.cpu_count() or 1))

_TRIES = 3


def _ignore() -> None:
    pass


class Writer:
    """Writes block files of one job. Used from one thread.

    An error of any file (StoreUnavailable) is raised by the next `submit` or by `finish`.
    """

    def __init__(
        self, store: Store, *, threads: int = THREADS, waiting: int = MAX_WAITING_BYTES
    ) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvq-write")
        self._limit = waiting
        self._waiting = 0
        self._changed = threading.Condition()
        self._futures: list[Future[None]] = []
        self._directories: set[Path] = set()
        #: Bytes of kept and of checkpoint files written so far.
        self.bytes_written = 0
        self.checkpoint_bytes = 0

    def submit(
        self,
        path: Path,
        meta: BlockMeta,
        tensors: Sequence[Tensor],
        *,
        checkpoint: bool = False,
        written: Callable[[], None] = _ignore,
    ) -> None:
        """Queue one file; blocks while too many bytes wait for the disk.

        `written()` is called, on a thread of the writer, once the tensors' memory is read no more.
        """
        size = sum(tensor.nbytes for tensor in tensors)
        self._raise_failures()
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting == 0 or self._waiting + size <= self._limit
            )
            self._waiting += size
        future = self._pool.submit(self._write, path, meta, tensors, checkpoint, size)
        future.add_done_callback(lambda _: written())
        self._futures.append(future)

    def finish(self) -> None:
        """Wait until everything is on the disk, names included. Raises what a thread raised."""
        for future in self._futures:
            future.result()
        self._futures.clear()
        for directory in sorted(self._directories):
            with store_errors(directory):
                flush_directory(directory)
        self._directories.clear()

    def close(self) -> None:
        """Let the files in hand be finished, drop nothing, and end the threads."""
        self._pool.shutdown(wait=True)

    def _raise_failures(self) -> None:
        done = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if not future.done()]
        for future in done:
            future.result()

    def _write(
        self, path: Path, meta: BlockMeta, tensors: Sequence[Tensor], checkpoint: bool, size: int
    ) -> None:
        try:
            with store_errors(path):
                self._store.check()
                written = self._publish(path, meta, tensors, durable=not checkpoint)
            with self._changed:
                if checkpoint:
                    self.checkpoint_bytes += written
                else:
                    self.bytes_written += written
                    # Each directory up to the space's may be new, so its name is flushed too.
                    self._directories.update(path.parents[:4])
        finally:
            with self._changed:
                self._waiting -= size
                self._changed.notify_all()

    def _publish(
        self, path: Path, meta: BlockMeta, tensors: Sequence[Tensor], *, durable: bool
    ) -> int:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(FileNotFoundError):  # a sweep removed the empty directory
                make_directory(path.parent)
                return write_block(path, meta, tensors, durable=durable)
        make_directory(path.parent)
        return write_block(path, meta, tensors, durable=durable)
