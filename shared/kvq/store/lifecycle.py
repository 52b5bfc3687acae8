"""What happens to a cache after it was written: renamed, pinned, given a lifetime, forgotten.

Each changes manifests only. Blocks stay until they are collected.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase

from kvq.errors import CacheNotFound, DamagedFile, StoreUnavailable, UnsupportedFormat, UsageError
from kvq.store import layout
from kvq.store.manifest import Manifest
from kvq.store.names import check_name, valid_name
from kvq.store.store import Store
from kvq.units import parse_seconds

#: The last moment that a calendar can show.
_END_OF_TIME = 253402300799.0


@dataclass(frozen=True, kw_only=True)
class Manifests:
    """Every manifest of a store by name, and those that cannot be read, each with the reason."""

    readable: dict[str, Manifest]
    unreadable: dict[str, str]


def read_manifests(store: Store) -> Manifests:
    """All manifests, in order of name. Raises StoreUnavailable."""
    readable: dict[str, Manifest] = {}
    unreadable: dict[str, str] = {}
    for name in store.names():
        try:
            readable[name] = store.manifest(name)
        except CacheNotFound:  # forgotten meanwhile
            continue
        except (DamagedFile, UnsupportedFormat) as error:
            unreadable[name] = str(error)
    return Manifests(readable=readable, unreadable=unreadable)


def is_pattern(name: str) -> bool:
    """Whether `name` is a pattern (`*`, `?`, `[`) and not a cache's name."""
    return any(mark in name for mark in "*?[")


def choose(store: Store, names: Iterable[str]) -> list[str]:
    """The caches that `names` (names and patterns) mean, each once, in order.

    Raises CacheNotFound, which names those that are spelled alike, when one means nothing.
    """
    known = store.names()
    chosen: dict[str, None] = {}
    for name in names:
        if is_pattern(name):
            found = [one for one in known if fnmatchcase(one, name)]
            if not found:
                raise CacheNotFound(f"no cache in {store.path} has a name like {name!r}")
            chosen.update(dict.fromkeys(found))
        elif name in known:
            chosen[name] = None
        else:
            raise _not_found(store, name, known)
    return list(chosen)


def find(store: Store, name: str) -> Manifest:
    """The manifest of a cache.

    Raises CacheNotFound, which names those that are spelled alike, DamagedFile.
    """
    try:
        return store.manifest(check_name(name))
    except CacheNotFound:
        raise _not_found(store, name, store.names()) from None


def forget(store: Store, names: Iterable[str]) -> list[str]:
    """Remove the manifests of these caches, even unreadable ones; those that were there.

    Blocks stay until they are collected. Raises StoreUnavailable.
    """
    gone = []
    for name in names:
        with contextlib.suppress(CacheNotFound):
            store.remove_manifest(name)
            gone.append(name)
    return gone


def rename(store: Store, name: str, new: str, *, force: bool = False) -> Manifest:
    """Give the cache `name` the name `new`; its new manifest.

    A reader finds it by the old name, by both, or by the new one, never by none; with `force` a
    cache that has the new name is replaced in one step. Raises CacheNotFound, InvalidName, and
    UsageError when the name is taken.
    """
    check_name(new)
    manifest = find(store, name)
    if new == name:
        return manifest
    old_path, new_path = (layout.manifest_path(store.path, one) for one in (name, new))
    with contextlib.suppress(OSError):
        if os.path.samefile(old_path, new_path):
            raise UsageError(
                f"{name} and {new} are one name to this file system: rename by way of a third"
            )
    moved = replace(manifest, name=new)
    try:
        _republish(store, moved, exclusive=not force)
    except StoreUnavailable as error:
        if isinstance(error.__cause__, FileExistsError):
            raise UsageError(
                f"there is a cache named {new!r} already: choose another name, or replace it "
                "with --force"
            ) from None
        raise
    with contextlib.suppress(CacheNotFound):  # forgotten meanwhile
        store.remove_manifest(name)
    return moved


def set_pinned(store: Store, names: Sequence[str], pinned: bool) -> list[Manifest]:
    """Pin these caches, or unpin them; their manifests. Raises CacheNotFound, DamagedFile."""
    return _change(store, names, lambda one: replace(one, pinned=pinned))


def set_expiry(store: Store, names: Sequence[str], expires: float | None) -> list[Manifest]:
    """Let these caches expire at a time (seconds since 1970), or never; their manifests.

    Raises CacheNotFound, DamagedFile.
    """
    return _change(store, names, lambda one: replace(one, expires=expires))


def parse_expiry(text: str, now: float | None = None) -> float | None:
    """Seconds since 1970 at which to expire, None for never.

    `text` is a duration from `now` on (`7d`), a date or time in ISO 8601 (local time unless it
    says otherwise), or `never`. Raises ValueError.
    """
    cleaned = text.strip()
    if cleaned.lower() == "never":
        return None
    try:
        moment = (time.time() if now is None else now) + parse_seconds(cleaned)
    except ValueError:
        try:
            moment = datetime.fromisoformat(cleaned).timestamp()
        except (ValueError, OverflowError, OSError):
            raise ValueError(
                f"{text!r} is neither a duration such as 7d, nor a time such as 2031-05-01T12:00, "
                "nor never"
            ) from None
    if not 0 <= moment <= _END_OF_TIME:
        raise ValueError(f"{text!r} is not between the years 1970 and 9999")
    return moment


def _change(
    store: Store, names: Sequence[str], change: Callable[[Manifest], Manifest]
) -> list[Manifest]:
    # All are read before any is written: a name that is wrong changes nothing.
    before = [find(store, name) for name in names]
    after = [change(one) for one in before]
    for old, new in zip(before, after, strict=True):
        if new != old:
            _republish(store, new)
    return after


def _republish(store: Store, manifest: Manifest, *, exclusive: bool = False) -> None:
    """Write another manifest of blocks that are there, and hold them for it.

    A sweep that read the manifests before this one was there must not take what it names. A cache
    that has lost blocks can be changed all the same.
    """
    if not store.publish_held(manifest, exclusive=exclusive):
        store.write_manifest(manifest, exclusive=exclusive)


def _not_found(store: Store, name: str, known: Sequence[str]) -> CacheNotFound:
    alike = difflib.get_close_matches(name, known, n=3)
    if not valid_name(name):
        hint = "and none can have that name"
    elif alike:
        hint = f"did you mean {' or '.join(alike)}?"
    else:
        hint = "`kvq ls` lists them"
    return CacheNotFound(f"no cache named {name!r} in {store.path}; {hint}")
