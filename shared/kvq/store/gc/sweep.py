"""Going through every file of the spaces, and removing those that nothing needs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvq.store import layout
from kvq.store.census import BlockFile, Entry, Node, loose_files, nodes
from kvq.store.gc.aside import ABANDONED, Aside, move_aside
from kvq.store.gc.mark import Live, read_all
from kvq.store.gc.report import Kind, Policy, Report
from kvq.store.layout import BlockName
from kvq.store.store import Store

#: Files between two calls of the progress function.
_PROGRESS_EVERY = 1000


@dataclass(frozen=True, kw_only=True)
class _Doomed:
    """A file aside that is to be removed."""

    aside: Aside
    kind: Kind
    nbytes: int
    space: str
    block: BlockName


@dataclass(kw_only=True)
class Sweep:
    """One pass. `live` is None when it is not known which blocks are named: then blocks stay."""

    store: Store
    policy: Policy
    live: Live | None
    #: The store's time before the manifests were read.
    now: float
    report: Report
    on_progress: Callable[[int], None]
    _doomed: list[_Doomed] = field(default_factory=list)
    _emptied: set[Path] = field(default_factory=set)
    _seen: int = 0

    @property
    def cutoff(self) -> float:
        return self.now - self.policy.grace

    def run(self) -> None:
        """Do it, or only count (`report.dry_run`). Raises OSError, StoreUnavailable."""
        try:
            for node in nodes(self.store.path):
                self._node(node)
                if self.policy.settle == 0:
                    self._remove_doomed(self.live)
            for entry in loose_files(self.store.path):
                self._temporary(entry)
            if self._doomed:
                time.sleep(self.policy.settle)
                marked = read_all(self.store)
                # A manifest that cannot be read may name any of them.
                live = None if marked.unreadable else Live.of(marked.readable.values())
                self._remove_doomed(live)
        finally:
            for one in self._doomed:
                with contextlib.suppress(OSError):
                    one.aside.put_back()
        self.on_progress(self._seen)
        self._remove_empty()

    def _node(self, node: Node) -> None:
        self._recover(node)
        for block, files in node.blocks.items():
            self._look(len(files))
            if self.live is None or self.live.has(node.space, block):
                self._stale_checkpoints(node, block, files)
            elif any(one.mtime >= self.cutoff for one in files):
                for one in files:
                    self.report.young.add(one.nbytes)
                    self.report.kept_bytes += one.nbytes
            else:
                self._unreachable(node, block, files)
        for entry in node.temps:
            self._temporary(entry)
        if not node.blocks and not node.temps:
            self._emptied.add(node.path)

    def _unreachable(self, node: Node, block: BlockName, files: list[BlockFile]) -> None:
        # The kv file first: a writer that relies on the block touches it, or finds it gone.
        files.sort(key=lambda one: one.record != "kv")
        for number, one in enumerate(files):
            if not self._doom(node, block, one, Kind.UNREACHABLE) and one.record == "kv":
                for other in files[number + 1 :]:
                    self.report.kept_bytes += other.nbytes
                return
        self._emptied.add(node.path)

    def _stale_checkpoints(self, node: Node, block: BlockName, files: list[BlockFile]) -> None:
        for one in files:
            if one.checkpoint and one.mtime < self.cutoff:
                self._doom(node, block, one, Kind.CHECKPOINT)
            else:
                self.report.kept_bytes += one.nbytes

    def _doom(self, node: Node, block: BlockName, file: BlockFile, kind: Kind) -> bool:
        """Move a file aside to be removed; False when it is in use after all."""
        if self.report.dry_run:
            self.report.count(kind, file.nbytes)
            return True
        aside = move_aside(file.path)
        if aside is None:  # another sweep was first
            return True
        if aside.touched_since(self.cutoff):
            aside.put_back()
            self.report.put_back += 1
            self.report.kept_bytes += file.nbytes
            return False
        self._doomed.append(
            _Doomed(aside=aside, kind=kind, nbytes=file.nbytes, space=node.space, block=block)
        )
        return True

    def _remove_doomed(self, live: Live | None) -> None:
        """Remove what is aside, except what is touched or named by now."""
        while self._doomed:
            one = self._doomed[-1]
            named = one.kind is Kind.UNREACHABLE and (
                live is None or live.has(one.space, one.block)
            )
            with contextlib.suppress(FileNotFoundError):  # another sweep was first
                if named or one.aside.touched_since(self.cutoff):
                    one.aside.put_back()
                    self.report.put_back += 1
                    self.report.kept_bytes += one.nbytes
                elif one.aside.remove():
                    self.report.count(one.kind, one.nbytes)
            self._doomed.pop()

    def _recover(self, node: Node) -> None:
        """Put back what a sweep that was killed has left aside; the next sweep judges it."""
        for entry in node.aside:
            if entry.ctime < self.now - ABANDONED and not self.report.dry_run:
                Aside.left_at(entry.path).put_back()
                self.report.put_back += 1
            self.report.kept_bytes += entry.nbytes

    def _temporary(self, entry: Entry) -> None:
        self._look(1)
        if entry.mtime >= self.cutoff:
            self.report.young.add(entry.nbytes)
            self.report.kept_bytes += entry.nbytes
            return
        if not self.report.dry_run:
            entry.path.unlink(missing_ok=True)
        self.report.count(Kind.TEMPORARY, entry.nbytes)

    def _remove_empty(self) -> None:
        """Remove directories that became empty; writers make theirs again."""
        if self.report.dry_run:
            return
        for folder in sorted(self._emptied):
            for empty in _upwards(folder, layout.spaces_dir(self.store.path)):
                try:
                    os.rmdir(empty)
                except OSError:
                    break

    def _look(self, files: int) -> None:
        before, self._seen = self._seen, self._seen + files
        if before // _PROGRESS_EVERY != self._seen // _PROGRESS_EVERY:
            self.on_progress(self._seen)


def _upwards(folder: Path, spaces: Path) -> Iterable[Path]:
    """The node directory and the shelf that it is on."""
    for one in (folder, folder.parent):
        if spaces in one.parents:
            yield one
