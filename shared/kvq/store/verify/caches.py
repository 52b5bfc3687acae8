"""Checking that a cache can be had as its manifest says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvq.errors import DamagedFile
from kvq.store import layout
from kvq.store.blockfile import read_header
from kvq.store.keys import BLOCK, TokenIds, as_ids
from kvq.store.layout import block_path
from kvq.store.manifest import Manifest
from kvq.store.restorable import Restorable
from kvq.store.space import Space
from kvq.store.store import Store
from kvq.store.verify.report import Severity
from kvq.store.walk import walk

#: How bad, and what.
Fault = tuple[Severity, str]


def faults(store: Store, manifest: Manifest, space: Space | None) -> Iterator[Fault]:
    """What is wrong with the cache. `space` is that of the manifest, None when it is not there.

    Raises OSError, UnsupportedFormat.
    """
    chain = manifest.blocks()[: len(manifest.chain)]
    lengths = [block.n for block in chain]
    if any(n != BLOCK for n in lengths[:-1]) or sum(lengths) != manifest.tokens:
        yield Severity.ERROR, f"its blocks hold {sum(lengths)} tokens, not {manifest.tokens}"
        return
    if space is None:
        yield Severity.ERROR, f"its space {manifest.space} is not there"
        return
    said = (manifest.fingerprint, manifest.codec, manifest.dtype)
    if said != (space.fingerprint, space.codec, space.dtype):
        yield (
            Severity.ERROR,
            f"it says {said}, its space {(space.fingerprint, space.codec, space.dtype)}",
        )
    ids = token_ids(store, manifest)
    if len(ids) < manifest.tokens:
        yield Severity.ERROR, f"the block after token {len(ids)} is missing or damaged"
        return
    walked = walk(store.space_folder(space), ids)
    restorable = Restorable(walked, space.needs)
    plan = restorable.deepest()
    if plan.tokens != manifest.tokens:
        yield Severity.ERROR, f"only {plan.tokens} of its {manifest.tokens} tokens can be restored"
    elif plan.logits is None:
        # One that was imported may never have had them.
        what = "the logits after its last token are missing: a repetition feeds tokens again"
        yield Severity.WARNING, what
    for position in manifest.kept:
        if position < plan.tokens and restorable.at(position) is None:
            yield (
                Severity.ERROR,
                f"it cannot be restored at token {position}, which it says was kept",
            )


def token_ids(store: Store, manifest: Manifest) -> TokenIds:
    """The prompt's token ids, read from the headers of its blocks, up to the first that is bad.

    Raises OSError, UnsupportedFormat.
    """
    folder = layout.spaces_dir(store.path) / manifest.space
    found: list[TokenIds] = []
    for block in manifest.blocks()[: len(manifest.chain)]:
        try:
            meta = read_header(block_path(folder, block)).meta
        except (FileNotFoundError, DamagedFile):
            break
        if meta.key != block.key:
            break
        found.append(meta.token_ids)
    return np.concatenate(found) if found else as_ids([])
