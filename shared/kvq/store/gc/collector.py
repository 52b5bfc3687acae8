"""One sweep over a store; the package says why it is safe."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable
from functools import partial

from kvq.errors import DamagedFile, UnsupportedFormat
from kvq.store import layout
from kvq.store.census import ASIDE_PREFIX, Entry, nodes, scan
from kvq.store.disk import publish, store_errors
from kvq.store.gc.aside import ABANDONED, Aside, move_aside
from kvq.store.gc.mark import Live, Marked, read_all
from kvq.store.gc.quota import BlockSize, Place, choose_evictions
from kvq.store.gc.report import Kind, Policy, Removed, Report
from kvq.store.gc.sweep import Sweep
from kvq.store.manifest import Manifest
from kvq.store.store import Store

#: Called with the number of files looked at so far.
OnProgress = Callable[[int], None]


def _ignore(files: int) -> None:
    pass


def collect(
    store: Store,
    policy: Policy | None = None,
    *,
    dry_run: bool = False,
    on_progress: OnProgress = _ignore,
) -> Report:
    """Remove what `policy` says, or with `dry_run` only report it.

    Safe beside writers, readers and other sweeps; ended at any point it leaves nothing that the
    next sweep does not mend. Raises StoreUnavailable.
    """
    policy = policy or Policy()
    report = Report(dry_run=dry_run)
    began = time.monotonic()
    with store_errors(store.path):
        store.check()
        now = _store_time(store, dry_run)
        if not dry_run:
            _recover_manifests(store, now)
        marked = read_all(store)
        report.unreadable = marked.unreadable
        remaining = _forget_expired(store, policy, marked, now, report)
        if policy.max_bytes is not None and not marked.unreadable:
            _evict(store, policy, remaining, now, report)
        report.kept_caches = len(remaining) + len(marked.unreadable)
        sweep = Sweep(
            store=store,
            policy=policy,
            live=None if marked.unreadable else Live.of(remaining.values()),
            now=now,
            report=report,
            on_progress=on_progress,
        )
        sweep.run()
    if policy.max_bytes is not None:
        report.over_quota = max(0, report.kept_bytes - policy.max_bytes)
    report.seconds = time.monotonic() - began
    return report


def _store_time(store: Store, dry_run: bool) -> float:
    """The file system's time, which need not be this machine's. Seconds since 1970."""
    path = store.path / f".tmp-clock-{time.time_ns()}"
    try:
        publish(path, [b""], durable=False)
        try:
            return path.stat().st_mtime
        finally:
            path.unlink()
    except OSError:
        if dry_run:  # who only looks need not be able to write
            return time.time()
        raise


def _recover_manifests(store: Store, now: float) -> None:
    """Give manifests their names again that a sweep held aside when it was killed."""
    folder = layout.caches_dir(store.path)
    for name, entry in scan(folder):
        if name.startswith(ASIDE_PREFIX) and _abandoned(entry, now):
            Aside.left_at(entry.path).put_back()


def _abandoned(entry: Entry, now: float) -> bool:
    return entry.ctime < now - ABANDONED


def _forget_expired(
    store: Store, policy: Policy, marked: Marked, now: float, report: Report
) -> dict[str, Manifest]:
    """Forget the caches whose time is up; returns the manifests of the others by name."""

    def is_over(manifest: Manifest) -> bool:
        return not manifest.pinned and manifest.expires is not None and manifest.expires <= now

    remaining = dict(marked.readable)
    if not policy.expired:
        return remaining
    for name, manifest in marked.readable.items():
        if not is_over(manifest):
            continue
        if not report.dry_run and not _forget(store, name, is_over):
            # Its lifetime was just extended: what it names now may differ, and was touched.
            continue
        del remaining[name]
        assert manifest.expires is not None
        reason = f"expired {_date(manifest.expires)}"
        report.caches.append(Removed(name=name, kind=Kind.EXPIRED, reason=reason))
    return remaining


def _evict(
    store: Store, policy: Policy, remaining: dict[str, Manifest], now: float, report: Report
) -> None:
    """Forget caches until the quota holds; takes them out of `remaining`."""
    assert policy.max_bytes is not None
    cutoff = now - policy.grace
    live = Live.of(remaining.values())
    sizes: dict[Place, BlockSize] = {}
    total = 0
    for node in nodes(store.path):
        for block, files in node.blocks.items():
            size = BlockSize(sum(one.nbytes for one in files), max(one.mtime for one in files))
            if live.has(node.space, block):
                sizes[node.space, block.key] = size
            if live.has(node.space, block) or size.mtime >= cutoff:
                total += size.nbytes
    excess = total - policy.max_bytes
    for one in choose_evictions(remaining, sizes, excess=excess, cutoff=cutoff, now=now):
        unchanged = partial(operator.eq, remaining[one.name])
        if report.dry_run or _forget(store, one.name, unchanged):
            del remaining[one.name]
            report.caches.append(one)


def _forget(store: Store, name: str, still: Callable[[Manifest], bool]) -> bool:
    """Remove a manifest if, out of everyone's reach, it is `still` what was judged."""
    aside = move_aside(layout.manifest_path(store.path, name))
    if aside is None:
        return False
    with contextlib.suppress(DamagedFile, UnsupportedFormat, FileNotFoundError):
        if still(Manifest.decode(aside.place.read_bytes(), str(aside.place))):
            return aside.remove()
    aside.put_back()
    return False


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
