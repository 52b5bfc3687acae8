"""Holding files: what keeps a sweep from taking what a writer is about to rely on.

A writer that finds a file in place and does not write it again touches it: `touch`. Right before it
writes a manifest it touches all files of the manifest's blocks: `hold`. Either says when a file is
gone; it is then written again. The other half of the agreement is in `kvq.store.gc`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvq.store.layout import RECORDS, BlockName, block_path


def touch(path: Path) -> bool:
    """Mark the file as in use now; False when it is not there. Raises OSError."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def hold(space: Path, blocks: Iterable[BlockName]) -> bool:
    """Mark all files of `blocks`, in the space folder `space`, as in use now.

    False when a block has lost its `kv` file. Raises OSError.
    """
    whole = True
    for block in blocks:
        whole &= touch(block_path(space, block))
        for record in RECORDS[1:]:
            touch(block_path(space, block, record))
    return whole
