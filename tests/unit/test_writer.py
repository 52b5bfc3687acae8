"""The threads that write blocks: nothing half-written, errors surface, memory stays bounded."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from dummystore import KV_ONLY, files_in

from kvq.errors import StoreUnavailable
from kvq.store import Store
from kvq.store import writer as writer_module
from kvq.store.blockfile import BlockMeta, Tensor, check_data, read_header
from kvq.store.keys import ROOT, as_ids
from kvq.store.layout import BlockName, block_path
from kvq.store.writer import Writer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def writer(store: Store) -> Iterator[Writer]:
    writer = Writer(store, threads=2)
    yield writer
    writer.close()


def block(store: Store, token: int, size: int = 1000) -> tuple[Path, BlockMeta, list[Tensor]]:
    """What `submit` takes for a block of one token with `size` bytes of tensors."""
    ids = as_ids([token])
    meta = BlockMeta(
        record="kv", space=KV_ONLY.digest, parent=ROOT, token_ids=ids, start=0, groups=()
    )
    path = block_path(store.add_space(KV_ONLY), BlockName.of(ROOT, ids))
    return path, meta, [Tensor(name="0.k", dtype="U8", shape=(size,), data=bytes(size))]


def submit_all(writer: Writer, work: Iterable[tuple[Path, BlockMeta, list[Tensor]]]) -> None:
    for one in work:
        writer.submit(*one)
    writer.finish()


def test_files_are_whole_once_finished(store, writer):
    work = [block(store, token) for token in range(20)]
    for path, meta, tensors in work:
        writer.submit(path, meta, tensors)
    writer.finish()
    for path, meta, _ in work:
        header = read_header(path)
        check_data(header)
        assert header.meta.token_ids.tolist() == meta.token_ids.tolist()
    assert writer.bytes_written == sum(path.stat().st_size for path, _, _ in work)
    assert writer.checkpoint_bytes == 0


def test_checkpoints_are_counted_apart(store, writer):
    writer.submit(*block(store, 1), checkpoint=True)
    writer.finish()
    assert writer.bytes_written == 0
    assert writer.checkpoint_bytes > 1000


def test_an_error_surfaces_at_the_next_call_and_leaves_nothing(store, writer, monkeypatch):
    failed = threading.Event()

    def full(fd: int, data: memoryview) -> int:
        failed.set()
        raise OSError(28, "No space left on device")

    before = files_in(store.path)
    work = block(store, 1)
    before |= files_in(store.path)
    monkeypatch.setattr(os, "write", full)
    writer.submit(*work)
    assert failed.wait(20)
    with pytest.raises(StoreUnavailable, match="disk is full"):
        writer.finish()
    assert files_in(store.path) == before


def test_an_error_surfaces_at_submit(store, writer, monkeypatch):
    work = block(store, 1)
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
    writer.submit(*work)
    with pytest.raises(StoreUnavailable, match="reports an error"):
        submit_all(writer, itertools.repeat(work))


def test_a_failed_write_leaves_the_file_that_was_there(store, writer, monkeypatch):
    work = block(store, 1)
    writer.submit(*work)
    writer.finish()
    before = work[0].read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
    writer.submit(*block(store, 1, size=2000))
    with pytest.raises(StoreUnavailable):
        writer.finish()
    assert work[0].read_bytes() == before
    assert [p.name for p in work[0].parent.iterdir()] == [work[0].name]


def test_writing_ends_when_another_disk_is_mounted(store, writer, tmp_path):
    work = block(store, 1)
    other = Store.create(tmp_path / "other")
    (other.path / "kvq-store.json").rename(store.path / "kvq-store.json")
    writer.submit(*work)
    with pytest.raises(StoreUnavailable, match="another store is mounted"):
        writer.finish()
    assert not work[0].exists()


def test_submit_waits_for_the_disk(store, monkeypatch):
    """With room for two files, the third waits until one is written."""
    gate = threading.Semaphore(0)
    write_block = writer_module.write_block

    def slow(*args: object, **how: object) -> int:
        gate.acquire()
        return write_block(*args, **how)

    monkeypatch.setattr(writer_module, "write_block", slow)
    writer = Writer(store, threads=1, waiting=2500)
    work = [block(store, token) for token in range(3)]
    for one in work[:2]:
        writer.submit(*one)
    third = threading.Thread(target=lambda: writer.submit(*work[2]))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.release()
    third.join(20)
    assert not third.is_alive()
    gate.release(2)
    writer.finish()
    writer.close()
    assert all(path.exists() for path, _, _ in work)


def test_a_file_larger_than_the_limit_is_still_written(store):
    writer = Writer(store, threads=1, waiting=10)
    for token in range(3):
        writer.submit(*block(store, token))
    writer.finish()
    writer.close()
    assert writer.bytes_written > 3000


def test_close_finishes_what_was_handed_over(store):
    writer = Writer(store, threads=1)
    work = [block(store, token) for token in range(10)]
    for one in work:
        writer.submit(*one)
    writer.close()
    assert all(path.exists() for path, _, _ in work)


def test_a_directory_that_a_sweep_removes_is_made_again(store, writer, monkeypatch):
    """The sweep comes right between making the directory and writing into it."""
    work = block(store, 1)
    write_block = writer_module.write_block
    swept = []

    def sweep_first(path: Path, *args: object, **how: object) -> int:
        if not swept:
            path.parent.rmdir()
            swept.append(path)
        return write_block(path, *args, **how)

    monkeypatch.setattr(writer_module, "write_block", sweep_first)
    writer.submit(*work)
    writer.finish()
    assert swept == [work[0]]
    assert work[0].exists()


def test_every_directory_up_to_the_space_is_flushed(store, writer, monkeypatch):
    flushed: list[Path] = []
    monkeypatch.setattr(writer_module, "flush_directory", flushed.append)
    work = block(store, 1)
    writer.submit(*work)
    writer.finish()
    space = store.space_folder(KV_ONLY)
    node = work[0].parent
    assert set(flushed) == {space, space / "nodes", node.parent, node}


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no disk of a chosen size can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_ends_the_job_and_leaves_only_whole_files(tmp_path):
    with tiny_disk(tmp_path / "disk") as folder:
        store = Store.create(folder)
        writer = Writer(store, threads=2)
        work = [block(store, token, size=100_000) for token in range(8)]
        with pytest.raises(StoreUnavailable, match="disk is full: free space or run `kvq gc`"):
            submit_all(writer, work)
        writer.close()
        written = [path for path, _, _ in work if path.exists()]
        assert 0 < len(written) < 8
        for path in written:
            check_data(read_header(path))
        names = {path.name for path in files_in(folder)}
        assert names == {"kvq-store.json", "space.json", *(path.name for path in written)}
        # The job goes on once there is room.
        written[0].unlink()
        again = Writer(store)
        again.submit(*work[0])
        again.finish()
        again.close()


def test_rows_are_not_copied_before_they_are_written(store, writer):
    rows = np.arange(8, dtype=np.uint8)
    path, meta, _ = block(store, 1)
    tensor = Tensor(name="0.k", dtype="U8", shape=(8,), data=rows.data)
    writer.submit(path, meta, [tensor])
    writer.finish()
    header = read_header(path)
    assert path.read_bytes()[header.data_start :] == rows.tobytes()
