"""When a cache was last used, without a write for each read.

A reader that may write to the store sets the modification time of the last block that it restored,
at most once an hour; one that may not leaves no trace. A cache was last used when one of the blocks
that only it holds was, and counts as used when it was written.
"""

from __future__ import annotations

import contextlib
import os
import time

from kvq.store.restorable import RestorePlan

#: Seconds between two marks of one block.
MARK_EVERY = 3600.0


def note_use(plan: RestorePlan) -> None:
    """Mark the last block of `plan` as used now. Never raises."""
    if not plan.kv:
        return
    path = plan.kv[-1].header.path
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > MARK_EVERY:
            os.utime(path)
