"""A file is written whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache
from unit.stock_caches import assert_same, feed

from kvq.errors import FileFormatError, StoreUnavailable, UsageError
from kvq.stock import publish, read_prompt_cache, tensors, write_prompt_cache

_KILLED = """
import os, signal, sys
import mlx.core as mx
from mlx_lm.models.cache import KVCache
from kvq.stock import write_prompt_cache
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
cache = KVCache()
cache.update_and_fetch(mx.ones((1, 1, 5, 8)), mx.ones((1, 1, 5, 8)))
write_prompt_cache(sys.argv[1], [cache])
"""


def kill_a_writer_before_its_rename(path: Path) -> Path:
    """Run a process that dies then; the unfinished file that it leaves."""
    before = set(path.parent.iterdir())
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = set(path.parent.iterdir()) - before
    return left


def test_a_killed_writer_leaves_the_earlier_file(tmp_path: Path) -> None:
    cache = feed(KVCache(), 3)
    path = write_prompt_cache(tmp_path / "c.safetensors", [cache])
    left = kill_a_writer_before_its_rename(path)
    assert_same(read_prompt_cache(path).cache[0], cache)
    # Named so that every tool takes it for what it is, and that listing *.safetensors skips it.
    assert left.suffix == ".safetensors"
    assert left.name.startswith(".c.safetensors.tmp-")


def test_what_a_killed_writer_leaves_is_removed_once_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    left = kill_a_writer_before_its_rename(path)
    write_prompt_cache(path, [feed(KVCache(), 3)])
    assert left.exists()  # it could still be another writer at work
    long_ago = time.time() - 2 * 3600
    os.utime(left, (long_ago, long_ago))
    other = tmp_path / f".other{left.name}"
    other.touch()
    os.utime(other, (long_ago, long_ago))
    write_prompt_cache(path, [feed(KVCache(), 3)])
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_an_error_while_writing_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = feed(KVCache(), 3)
    path = write_prompt_cache(tmp_path / "c.safetensors", [cache])
    written: list[mx.array] = []

    def fail(array: mx.array) -> list[memoryview]:
        written.append(array)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensors, "_runs", fail)
    with pytest.raises(StoreUnavailable, match="cannot be written: No space left on device"):
        write_prompt_cache(path, [feed(KVCache(), 9)])
    assert written
    assert list(tmp_path.iterdir()) == [path]
    assert_same(read_prompt_cache(path).cache[0], cache)


def test_an_interrupt_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(array: mx.array) -> list[memoryview]:
        raise KeyboardInterrupt

    monkeypatch.setattr(tensors, "_runs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_prompt_cache(tmp_path / "c", [feed(KVCache(), 9)])
    assert not list(tmp_path.iterdir())


def test_bytes_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    flush, replace = publish._flush, os.replace

    def note_flush(fd: int) -> None:
        steps.append("folder" if os.path.isdir(f"/dev/fd/{fd}") else "bytes")
        flush(fd)

    def note_replace(*names: Any) -> None:
        steps.append("name")
        replace(*names)

    monkeypatch.setattr(publish, "_flush", note_flush)
    monkeypatch.setattr(os, "replace", note_replace)
    write_prompt_cache(tmp_path / "c", [feed(KVCache(), 3)])
    assert steps == ["bytes", "name", "folder"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    sizes = (3, 700)
    caches = {size: feed(KVCache(), size) for size in sizes}
    for cache in caches.values():
        mx.eval(cache.state[:2])
    write_prompt_cache(path, [caches[3]])
    done = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for turn in range(30):
                write_prompt_cache(path, [caches[sizes[turn % 2]]])
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        found = read_prompt_cache(path).cache[0]
        assert_same(found, caches[found.offset])
        seen.add(found.offset)
    writer.join()
    assert not failures
    assert seen <= set(sizes)
    assert list(tmp_path.iterdir()) == [path]


def test_the_suffix_is_added_as_mlx_does(tmp_path: Path) -> None:
    for name, expected in {
        "c": "c.safetensors",
        "c.v1": "c.v1.safetensors",
        "c.safetensors": "c.safetensors",
    }.items():
        assert write_prompt_cache(tmp_path / name, [KVCache()]) == tmp_path / expected
        assert (tmp_path / expected).is_file()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "real.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(target)
    write_prompt_cache(link, [feed(KVCache(), 3)])
    assert link.is_symlink()
    assert read_prompt_cache(target).tokens == 3


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write_prompt_cache(tmp_path / "c", [KVCache()])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_very_long_name(tmp_path: Path) -> None:
    path = write_prompt_cache(tmp_path / ("n" * 240), [feed(KVCache(), 3)])
    assert read_prompt_cache(path).tokens == 3


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none: there is no such folder"):
        write_prompt_cache(tmp_path / "none" / "c", [KVCache()])


@pytest.mark.parametrize("place", ["file/c", "folder.safetensors"])
def test_a_place_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(StoreUnavailable, match="cannot be written: "):
        write_prompt_cache(tmp_path / place, [KVCache()])
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.safetensors"}


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreUnavailable, match="Permission denied"):
        write_prompt_cache(tmp_path / "c", [KVCache()])


def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_prompt_cache(tmp_path / "c", [feed(KVCache(), 9)])
    load = mx.load

    def load_then_truncate(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        os.truncate(path, 16)
        return loaded

    monkeypatch.setattr(mx, "load", load_then_truncate)
    with pytest.raises(FileFormatError, match="it changed while it was read"):
        read_prompt_cache(path)


def test_tensors_start_at_multiples_of_their_item_size(tmp_path: Path) -> None:
    cache = ArraysCache(3)
    for slot, dtype in enumerate((mx.bool_, mx.float32, mx.bfloat16)):
        cache[slot] = mx.ones((1, 3), dtype)
    content = write_prompt_cache(tmp_path / "c", [cache]).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    assert start % 8 == 0
    assert content[start : start + 4] in (b"\0\0\x80\x3f", b"\0\0\0\0")
    assert_same(read_prompt_cache(tmp_path / "c.safetensors").cache[0], cache)
