"""The check of a whole store, one part after the other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvq.errors import CacheNotFound, DamagedFile, StoreUnavailable, UnsupportedFormat
from kvq.store import layout
from kvq.store.census import Node, nodes, subdirectories
from kvq.store.disk import UNREADABLE, store_errors
from kvq.store.gc.mark import Live, Marked, read_all
from kvq.store.layout import BlockName
from kvq.store.manifest import Manifest
from kvq.store.parallel import ordered
from kvq.store.space import FORMAT as SPACE_FORMAT
from kvq.store.space import Space
from kvq.store.store import Store
from kvq.store.verify.blocks import Checked, FileCheck, Links, check_file
from kvq.store.verify.caches import faults
from kvq.store.verify.leftovers import SWEEP, YOUNG, leftovers, quarantined
from kvq.store.verify.report import Finding, Severity, VerifyReport
from kvq.units import format_bytes

#: Called with (block files checked, bytes of tensors read).
OnProgress = Callable[[int, int], None]

_AGAIN = "submit the prompt again, and its missing blocks are computed; or forget it: `kvq rm`"
_ASIDE = "`kvq verify --repair` puts it aside, and what is missing is computed when wanted"
_UPGRADE = "upgrade kvq on this machine"


def _ignore(files: int, nbytes: int) -> None:
    pass


def verify(
    store: Store,
    *,
    deep: bool = True,
    repair: bool = False,
    threads: int = 4,
    on_progress: OnProgress = _ignore,
) -> VerifyReport:
    """Check `store`; without `deep` headers and links only, no tensors.

    With `repair`, files whose content is bad are put into quarantine; nothing else is changed.
    Memory stays within some hundred bytes a block. Files that come and go meanwhile are no
    findings. Raises StoreUnavailable when the store itself cannot be read.
    """
    began = time.monotonic()
    check = _Check(store, deep, repair, threads, on_progress)
    with store_errors(store.path):
        store.check()
        findings = tuple(check.run())
    return VerifyReport(
        deep=deep,
        files=check.files,
        nbytes=check.nbytes,
        caches=check.caches,
        findings=findings,
        seconds=time.monotonic() - began,
    )


class _Check:
    def __init__(
        self, store: Store, deep: bool, repair: bool, threads: int, on_progress: OnProgress
    ) -> None:
        self.store = store
        self.deep = deep
        self.repair = repair
        self.threads = threads
        self.on_progress = on_progress
        self.files = self.nbytes = self.caches = 0
        #: Blocks with a damaged file: (space, key).
        self.damaged: set[tuple[str, bytes]] = set()
        self.now = time.time()

    def run(self) -> Iterator[Finding]:
        spaces: dict[str, Space] = {}
        yield from self._spaces(spaces)
        marked = read_all(self.store)
        yield from self._blocks(marked)
        yield from self._caches(marked, spaces)
        yield from leftovers(self.store.path, self.now)
        yield from quarantined(self.store.path)

    # Spaces

    def _spaces(self, sound: dict[str, Space]) -> Iterator[Finding]:
        for folder in subdirectories(layout.spaces_dir(self.store.path)):
            path = folder / layout.SPACE_FILE
            try:
                facts = json.loads(path.read_bytes())
                if facts["format"] > SPACE_FORMAT:
                    yield self._finding(path, Severity.WARNING, "a newer format", _UPGRADE)
                    continue
                space = Space.from_json(facts)
                if space.digest != folder.name:
                    raise ValueError("it describes another space")
                sound[folder.name] = space
            except FileNotFoundError:
                yield self._finding(
                    path,
                    Severity.ERROR,
                    "missing, so that none of the space's blocks can be found",
                    "the next prefill with this model and codec writes it again",
                )
            except (OSError, *UNREADABLE) as error:
                yield self._damaged(DamagedFile(str(path), f"cannot be read ({error})"))

    # Blocks

    def _blocks(self, marked: Marked) -> Iterator[Finding]:
        live = Live.of(marked.readable.values())
        links = Links()
        orphans: dict[str, list[int]] = {}
        for (node, work), checked in ordered(
            lambda one: check_file(one[1]), self._files(live, orphans), threads=self.threads
        ):
            self.files += 1
            self.nbytes += checked.nbytes
            self.on_progress(self.files, self.nbytes)
            if checked.start is not None and work.file.record == "kv":
                links.add(node, work.block, checked.start)
            yield from self._told(work, checked)
        for path, what in links.broken():
            if path.exists() and not self._is_young(path.stat().st_mtime):
                yield self._finding(path, Severity.WARNING, what, SWEEP)
        if not marked.unreadable:
            for space, (files, nbytes) in orphans.items():
                what = f"{files} files, {format_bytes(nbytes)}, of blocks that no cache names"
                path = layout.spaces_dir(self.store.path) / space
                yield self._finding(path, Severity.NOTE, what, "`kvq gc` removes them")

    def _files(self, live: Live, orphans: dict[str, list[int]]) -> Iterator[tuple[Node, FileCheck]]:
        for node in nodes(self.store.path):
            for block, files in node.blocks.items():
                if not live.has(node.space, block):
                    self._count_orphans(node, block, orphans)
                for file in files:
                    check = FileCheck(file=file, space=node.space, block=block, deep=self.deep)
                    yield node, check

    def _count_orphans(self, node: Node, block: BlockName, orphans: dict[str, list[int]]) -> None:
        files = node.blocks[block]
        if not any(self._is_young(file.mtime) for file in files):
            tally = orphans.setdefault(node.space, [0, 0])
            tally[0] += len(files)
            tally[1] += sum(file.nbytes for file in files)

    def _told(self, work: FileCheck, checked: Checked) -> Iterator[Finding]:
        if checked.damage is not None:
            self.damaged.add((work.space, work.block.key))
            yield self._damaged(checked.damage)
        elif checked.newer:
            yield self._finding(work.file.path, Severity.WARNING, "a newer format", _UPGRADE)
        elif checked.unreadable:
            what = f"cannot be read: {checked.unreadable}"
            advice = "check the disk, and the owner and mode of the file"
            yield self._finding(work.file.path, Severity.ERROR, what, advice)

    # Caches

    def _caches(self, marked: Marked, spaces: dict[str, Space]) -> Iterator[Finding]:
        for name in marked.unreadable:
            yield from self._unreadable(name)
        for name, manifest in marked.readable.items():
            self.caches += 1
            path = layout.manifest_path(self.store.path, name)
            if manifest.name != name:
                what = f"it is a copy of the cache {manifest.name!r}"
                yield self._finding(path, Severity.WARNING, what, "forget one of them: `kvq rm`")
            try:
                found = list(faults(self.store, manifest, spaces.get(manifest.space)))
            except UnsupportedFormat:
                yield self._finding(path, Severity.WARNING, "blocks of a newer format", _UPGRADE)
                continue
            bad = sum((manifest.space, one.key) in self.damaged for one in manifest.blocks())
            if bad:
                what = f"{bad} of its {len(manifest.blocks())} blocks had a damaged file"
                found.insert(0, (Severity.ERROR, what))
            if found and self._still(name, manifest):
                for severity, what in found:
                    yield self._finding(path, severity, what, _AGAIN)

    def _unreadable(self, name: str) -> Iterator[Finding]:
        path = layout.manifest_path(self.store.path, name)
        try:
            self.store.manifest(name)
        except DamagedFile as damage:
            yield self._damaged(damage)
        except UnsupportedFormat:
            yield self._finding(path, Severity.WARNING, "a newer format", _UPGRADE)
        except CacheNotFound:
            return

    def _still(self, name: str, manifest: Manifest) -> bool:
        """Whether the cache is as it was: one that was changed meanwhile is no finding."""
        try:
            return self.store.manifest(name) == manifest
        except (CacheNotFound, DamagedFile, UnsupportedFormat, StoreUnavailable):
            return False

    # Findings

    def _damaged(self, damage: DamagedFile) -> Finding:
        path = Path(damage.path)
        repaired = self.repair and self.store.quarantine(damage)
        advice = "what is missing is computed when it is wanted" if repaired else _ASIDE
        return self._finding(path, Severity.ERROR, damage.reason, advice, repaired=repaired)

    def _finding(
        self, path: Path, severity: Severity, what: str, advice: str, *, repaired: bool = False
    ) -> Finding:
        return Finding.at(self.store.path, path, severity, what, advice, repaired=repaired)

    def _is_young(self, mtime: float) -> bool:
        return mtime > self.now - YOUNG
