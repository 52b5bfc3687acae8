"""A store: a folder on a local disk or a network share. No database, no locks, no shared index."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvq.errors import (
    CacheNotFound,
    DamagedFile,
    StoreNotFound,
    StoreUnavailable,
    UnsupportedFormat,
)
from kvq.store import layout
from kvq.store.disk import (
    UNREADABLE,
    flush_device,
    flush_directory,
    make_directory,
    publish,
    store_errors,
)
from kvq.store.hold import hold
from kvq.store.keys import BLOCK, as_ids
from kvq.store.manifest import Manifest
from kvq.store.match import Match, match_in_space
from kvq.store.names import check_name, valid_name
from kvq.store.reason import End, Reason
from kvq.store.space import Space

#: Version of the layout of folders. A reader refuses a greater one.
FORMAT = 1

#: Of two matches of equal length, the one in the more exact codec wins.
_EXACTNESS = {"raw": 2, "q8": 1, "q4": 0}

#: What the folder of a new store may hold: file systems and network drives put these there.
_NOT_FOREIGN = {layout.STORE_FILE, "lost+found", "@eaDir", "#recycle", "System Volume Information"}


class Store:
    """An existing store at `path`.

    Raises StoreNotFound when the folder has no kvq-store.json, UnsupportedFormat when a newer kvq
    wrote it, StoreUnavailable when it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        facts = self._read_store_file()
        #: Identity of the store, so that another one mounted in its place is noticed.
        self.id = str(facts["id"])

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Store:
        """The store at `path`, made when the folder is absent or empty; an existing one is opened.

        Raises StoreNotFound for a folder that holds something else.
        """
        folder = Path(path).expanduser().absolute()
        with store_errors(folder):
            if not (folder / layout.STORE_FILE).exists():
                make_directory(folder)
                names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
                if names - _NOT_FOREIGN:
                    raise StoreNotFound(
                        f"{folder} is not a kvq store and not empty: name a new or empty folder"
                    )
                facts = {"format": FORMAT, "block": BLOCK, "id": secrets.token_hex(8)}
                data = (json.dumps(facts, indent=1) + "\n").encode()
                # Two creators: the first one's identity holds, and both read it back.
                with contextlib.suppress(FileExistsError):
                    publish(folder / layout.STORE_FILE, [data], exclusive=True)
                flush_directory(folder)
        return cls(folder)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    def check(self) -> None:
        """Raise StoreUnavailable unless this very store is still mounted at its path."""
        try:
            facts = self._read_store_file()
        except StoreNotFound as error:
            raise StoreUnavailable(str(error)) from error
        if facts["id"] != self.id:
            raise StoreUnavailable(
                f"{self.path}: another store is mounted here now (id {facts['id']}, not {self.id})"
            )

    # Spaces

    def space_folder(self, space: Space) -> Path:
        """Folder of a space; it may not exist yet."""
        return layout.spaces_dir(self.path) / space.digest

    def add_space(self, space: Space) -> Path:
        """Make the folder and the space.json of `space` unless they exist; returns the folder."""
        folder = self.space_folder(space)
        with store_errors(folder):
            if not (folder / layout.SPACE_FILE).exists():
                self.check()
                make_directory(folder)
                data = (json.dumps(space.as_json(), indent=1) + "\n").encode()
                publish(folder / layout.SPACE_FILE, [data])
                for directory in (folder, folder.parent, self.path):
                    flush_directory(directory)
        return folder

    def spaces(self, fingerprint: str | None = None) -> list[Space]:
        """The spaces of a model, or of all; those whose space.json cannot be read are left out."""
        found = []
        with store_errors(self.path):
            for folder in _folders(layout.spaces_dir(self.path)):
                try:
                    space = Space.from_json(json.loads((folder / layout.SPACE_FILE).read_bytes()))
                except (OSError, *UNREADABLE):
                    continue
                if space.digest == folder.name and fingerprint in (None, space.fingerprint):
                    found.append(space)
        return found

    # Matching

    def match(
        self,
        fingerprint: str,
        token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        codecs: Sequence[str] | None = None,
    ) -> Match:
        """The longest stored prefix of `token_ids` that the model can be restored at.

        Reads names and headers, no tensors. With `codecs`, only spaces of those are looked at. Of
        equal lengths the more exact codec wins. Never raises for a miss: `match.reason` says why.
        Raises ValueError for ids that are not token ids, StoreError when the store cannot be read.
        """
        ids = as_ids(token_ids)
        spaces = [
            space for space in self.spaces(fingerprint) if codecs is None or space.codec in codecs
        ]
        if not spaces:
            return Match(ids=ids, tokens=0, space=None, reason=self._no_space(fingerprint, codecs))
        with store_errors(self.path):
            matches = [
                match_in_space(self, space, self.space_folder(space), ids) for space in spaces
            ]
        matches.sort(key=_rank, reverse=True)
        ranking = tuple((one.space.codec, one.tokens) for one in matches if one.space)
        best = matches[0]
        return Match(**{**_fields(best), "spaces": ranking})

    def _no_space(self, fingerprint: str, codecs: Sequence[str] | None) -> Reason:
        self.check()  # a share that is not mounted looks empty too
        others = self.spaces()
        if any(space.fingerprint == fingerprint for space in others):
            have = sorted({s.codec for s in others if s.fingerprint == fingerprint})
            message = f"this model is stored with codec {', '.join(have)} only"
            return Reason(end=End.NO_SPACE, message=f"{message}, not with {codecs}")
        if others:
            return Reason(
                end=End.OTHER_MODEL,
                message=f"the store holds nothing of this model (fingerprint {fingerprint[:12]}), "
                "only of others; a change of weights, config or adapter changes the fingerprint",
            )
        return Reason(end=End.NO_SPACE, message="the store is empty")

    # Manifests

    def manifest(self, name: str) -> Manifest:
        """The manifest of a cache. Raises CacheNotFound, DamagedFile."""
        path = layout.manifest_path(self.path, check_name(name))
        try:
            with store_errors(path):
                return Manifest.decode(path.read_bytes(), str(path))
        except StoreUnavailable as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise CacheNotFound(
                    f"no cache named {name!r} in {self.path}; `kvq ls` lists them"
                ) from None
            raise

    def manifests(self) -> Iterator[Manifest]:
        """Every manifest that can be read, by name; `kvq verify` tells of those that cannot."""
        for name in self.names():
            with contextlib.suppress(CacheNotFound, DamagedFile, UnsupportedFormat):
                yield self.manifest(name)

    def names(self) -> list[str]:
        """Names of all caches, sorted."""
        with store_errors(self.path):
            folder = layout.caches_dir(self.path)
            names = os.listdir(folder) if folder.is_dir() else []
        return sorted(n.removesuffix(".json") for n in names if _is_manifest(n))

    def write_manifest(self, manifest: Manifest, *, exclusive: bool = False) -> None:
        """Publish a manifest durably; one of the same name is replaced.

        Nothing keeps a sweep from taking its blocks right before: use `publish_held`. Raises
        StoreUnavailable, whose cause is FileExistsError when `exclusive` and the name is taken.
        """
        path = layout.manifest_path(self.path, check_name(manifest.name))
        with store_errors(path):
            self.check()
            make_directory(path.parent)
            publish(path, [manifest.encode()], exclusive=exclusive)
            flush_directory(path.parent)
            flush_directory(self.path)
            flush_device(path)

    def publish_held(self, manifest: Manifest, *, exclusive: bool = False) -> bool:
        """Hold the manifest's blocks against sweeps, then write it as `write_manifest` does.

        Returns whether all blocks were there; if not, nothing is written. Raises as
        `write_manifest`.
        """
        folder = layout.spaces_dir(self.path) / manifest.space
        with store_errors(folder):
            whole = hold(folder, manifest.blocks())
        if whole:
            self.write_manifest(manifest, exclusive=exclusive)
        return whole

    def remove_manifest(self, name: str) -> None:
        """Forget a cache; its blocks stay until they are collected. Raises CacheNotFound."""
        path = layout.manifest_path(self.path, check_name(name))
        try:
            with store_errors(path):
                path.unlink()
        except StoreUnavailable as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise CacheNotFound(f"no cache named {name!r} in {self.path}") from None
            raise

    # Damage

    def quarantine(self, damage: DamagedFile) -> bool:
        """Move a damaged file out of readers' way, with the reason beside it.

        Returns whether it is out of the way, whoever moved it; False when this process may not
        write to the store.
        """
        source = Path(damage.path)
        target = layout.quarantine_dir(self.path) / f"{time.time_ns()}-{source.name}"
        note = {"file": str(source.relative_to(self.path)), "reason": damage.reason}
        try:
            make_directory(target.parent)
            os.rename(source, target)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        with contextlib.suppress(OSError):
            publish(layout.quarantine_note(target), [(json.dumps(note) + "\n").encode()])
        return True

    def _read_store_file(self) -> dict[str, Any]:
        path = self.path / layout.STORE_FILE
        try:
            with store_errors(path):
                facts = json.loads(path.read_bytes())
                version, block, _ = facts["format"], facts["block"], facts["id"]
                newer = version > FORMAT or block != BLOCK
        except StoreUnavailable as error:
            if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                raise StoreNotFound(
                    f"{self.path} is not a kvq store: it has no {layout.STORE_FILE}. Is the share "
                    "mounted? A new store is made by `kvq run` or `kvq submit --create-store`."
                ) from None
            raise
        except UNREADABLE as error:
            raise DamagedFile(str(path), f"cannot be read ({error})") from error
        if newer:
            raise UnsupportedFormat(
                f"{path}: format {version} with blocks of {block} tokens; this kvq reads format "
                f"{FORMAT} with {BLOCK}: upgrade kvq on this machine"
            )
        return dict(facts)


def _rank(match: Match) -> tuple[int, bool, int]:
    codec = match.space.codec if match.space else ""
    return match.tokens, match.exact, _EXACTNESS.get(codec, -1)


def _fields(match: Match) -> dict[str, Any]:
    return {name: getattr(match, name) for name in match.__dataclass_fields__}


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(child for child in path.iterdir() if child.is_dir())


def _is_manifest(name: str) -> bool:
    return name.endswith(".json") and valid_name(name.removesuffix(".json"))
