"""Collecting what a store no longer needs, while workers write and apps read.

What goes: caches whose time is up; then, if there is a quota, the caches of least worth; then
blocks that no manifest names; and what ended jobs have left (checkpoints, unfinished files). What
never goes: a block that a manifest names, and anything younger than the grace period.

There are no locks, so a writer may rely on an old block that no manifest names yet, at the very
moment at which a sweep takes it. What prevents that is an agreement (`kvq.store.hold` is the other
half):

- A writer touches each file that it finds and relies on, and all files of a manifest right before
  it writes the manifest. Touching fails when the file is gone; then it is written again.
- A sweep notes the store's own time T, then reads the manifests, and takes only files whose last
  touch is before T - grace. It first moves such a file aside, out of its name, and looks at its
  time again before it removes it.

Suppose that a manifest names a block that no manifest named before. The writer touched its file at
a time t, and wrote the manifest within the grace period after t. If the file was moved aside before
t, the touch failed, and there is no such manifest. If it was moved later, the sweep saw the time t
afterwards: either t >= T - grace, and the file was put back; or t < T - grace, so that the manifest
was there before T, the sweep had read it, and did not touch the block. A manifest that is renamed
or changed is a new manifest in this sense. Times are the file system's, so clocks need not agree.

A client of a network share may touch a file by an old name for as long as it remembers directories.
So there a sweep waits (`settle`) between moving aside and removing, reads the manifests once more,
and puts back what was touched or named meanwhile. A reader that meets a gap restores less: never an
error.
"""

from __future__ import annotations

from kvq.store.gc.collector import collect
from kvq.store.gc.report import Kind, Policy, Removed, Report

__all__ = ["Kind", "Policy", "Removed", "Report", "collect"]
