"""Digests of large files: read in parallel, and remembered while the file stays the same."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvq.errors import ModelNotFound

#: Bytes in a digest.
DIGEST_BYTES = 20
#: A file is digested in pieces of this many bytes, so that one large file keeps all cores busy.
PIECE = 64 << 20

_BUFFER = 1 << 20
_THREADS = min(8, os.cpu_count() or 1)
_REMEMBERED = 4096
# A change within one tick of the file system's clock leaves the times as they were.
_TICK_NS, _COARSE_TICK_NS = 20_000_000, 2_000_000_000


def file_digests(paths: Sequence[Path]) -> list[bytes]:
    """The digest of each file: blake2b-160 over its size (u64) and its pieces' blake2b-160s.

    A file whose real path, size, times and inode are as remembered is not read. Raises
    ModelNotFound when a file cannot be read, or changes meanwhile.
    """
    memory = _Memory(memory_path())
    try:
        before = [_Identity(path) for path in paths]
        known = [memory.recall(one) for one in before]
        unknown = [one for one, digest in zip(before, known, strict=True) if digest is None]
        fresh = dict(zip(unknown, _read_all(unknown), strict=True))
        for one in fresh:
            if _Identity(one.path).stamp != one.stamp:
                raise ModelNotFound(f"{one.path} changed while it was read: wait for its writer")
    except OSError as error:
        raise ModelNotFound(f"the model's weights cannot be read: {error}") from error
    memory.remember(fresh)
    return [
        fresh[one] if digest is None else digest for one, digest in zip(before, known, strict=True)
    ]


def memory_path() -> Path | None:
    """Where digests are remembered: KVQ_CACHE_DIR, or the user's cache folder; None without one."""
    if given := os.environ.get("KVQ_CACHE_DIR", "").strip():
        return Path(given).expanduser() / "fingerprints.json"
    with contextlib.suppress(RuntimeError):  # a user without a home
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "kvq" / "fingerprints.json"
        base = os.environ.get("XDG_CACHE_HOME", "")
        cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        return cache / "kvq" / "fingerprints.json"
    return None


class _Identity:
    """A file as the file system describes it; equal stamps mean equal content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.real = os.path.realpath(path)
        facts = os.stat(self.real)
        self.size = facts.st_size
        self.changed_ns = min(facts.st_mtime_ns, facts.st_ctime_ns)
        self.stamp = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]

    def settled(self) -> bool:
        """True when any later change must show in the times."""
        coarse = self.changed_ns % 1_000_000_000 == 0
        return time.time_ns() - self.changed_ns > (_COARSE_TICK_NS if coarse else _TICK_NS)


class _Memory:
    """Digests by real path, in one JSON file that may be missing, damaged or read-only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._files = self._read()

    def recall(self, one: _Identity) -> bytes | None:
        match self._files.get(one.real):
            case [*stamp, str(digest)] if stamp == one.stamp and len(digest) == 2 * DIGEST_BYTES:
                with contextlib.suppress(ValueError):
                    return bytes.fromhex(digest)
        return None

    def remember(self, digests: dict[_Identity, bytes]) -> None:
        """Add `digests`, atomically. Of two writers at once one may lose; it reads again later."""
        new = {
            one.real: [*one.stamp, digest.hex()] for one, digest in digests.items() if one.settled()
        }
        if self._path is None or not new:
            return
        files = {path: entry for path, entry in self._read().items() if path not in new} | new
        files = dict(list(files.items())[-_REMEMBERED:])
        temp = self._path.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(6)}.json")
        with contextlib.suppress(OSError, UnicodeError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    json.dump({"version": 1, "files": files}, file)
                os.replace(temp, self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temp.unlink()
                raise

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            content = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("version") != 1:
            return {}
        files = content.get("files")
        return files if isinstance(files, dict) else {}


def _read_all(files: Sequence[_Identity]) -> list[bytes]:
    pieces = [(one, start) for one in files for start in range(0, one.size, PIECE)]
    if not pieces:
        return [_join(one.size, []) for one in files]
    with ThreadPoolExecutor(min(_THREADS, len(pieces)), "kvq-digest") as pool:
        digests = iter(list(pool.map(_read_piece, pieces)))
    return [_join(one.size, [next(digests) for _ in range(0, one.size, PIECE)]) for one in files]


def _read_piece(piece: tuple[_Identity, int]) -> bytes:
    one, start = piece
    digest = blake2b(digest_size=DIGEST_BYTES)
    left = min(PIECE, one.size - start)
    buffer = memoryview(bytearray(min(_BUFFER, left)))
    with open(one.real, "rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, _BUFFER)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _join(size: int, pieces: Sequence[bytes]) -> bytes:
    data = size.to_bytes(8, "little") + b"".join(pieces)
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
