"""Reading everything in a store to see whether it holds: digests, keys, chains, manifests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kvq.errors import CacheNotFound, DamagedFile, StoreError, UnsupportedFormat
from kvq.store.blockfile import Header, check_data, read_header
from kvq.store.census import BlockFile, Node, nodes
from kvq.store.disk import store_errors
from kvq.store.layout import BlockName, quarantine_dir
from kvq.store.manifest import Manifest
from kvq.store.parallel import ordered
from kvq.store.store import Store

_THREADS = 8

#: Called with the numbers of files read and bytes read so far.
OnProgress = Callable[[int, int], None]


def _ignore(files: int, nbytes: int) -> None:
    pass


class Fault(StrEnum):
    """What can be wrong."""

    DAMAGED = "damaged"  #: a block file whose digest or header does not hold
    INCOMPLETE = "incomplete"  #: a cache whose chain lacks a block
    MANIFEST = "manifest"  #: a manifest that cannot be read
    NEWER = "newer"  #: written by a newer kvq


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong: where, what, and what to do. `moved`: it is in quarantine now."""

    fault: Fault
    path: str
    what: str
    advice: str
    moved: bool = False


@dataclass(kw_only=True)
class VerifyReport:
    """What was read and found. Sizes are bytes.

    `orphans` are blocks that no manifest names (shared prefixes, forgotten caches): no fault, they
    are what `kvq gc` collects. `leftovers` are temporary files and checkpoints, `quarantined` files
    that were put aside earlier.
    """

    caches: int = 0
    files: int = 0
    nbytes: int = 0
    orphans: int = 0
    leftovers: int = 0
    quarantined: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def verify(
    store: Store, *, deep: bool = True, repair: bool = False, on_progress: OnProgress = _ignore
) -> VerifyReport:
    """Check every file of the store; with `deep`, tensor data too (else names and headers).

    With `repair`, damaged block files go into quarantine, so that the next prefill writes them
    again. Changes nothing otherwise. Memory does not grow with the store's tensors. Raises
    StoreUnavailable when the store cannot be read.
    """
    report = VerifyReport()
    with store_errors(store.path):
        store.check()
        manifests = _manifests(store, report)
        blocks = _blocks(store, deep, repair, report, on_progress)
        report.quarantined = sum(
            1 for path in quarantine_dir(store.path).glob("*") if path.suffix != ".json"
        )
    named: set[tuple[str, bytes]] = set()
    for manifest in manifests:
        missing = [one for one in manifest.blocks() if (manifest.space, one.key) not in blocks]
        named.update((manifest.space, one.key) for one in manifest.blocks())
        if missing:
            report.findings.append(_incomplete(manifest, missing))
    report.orphans = len(blocks - named)
    return report


def _manifests(store: Store, report: VerifyReport) -> list[Manifest]:
    readable = []
    for name in store.names():
        try:
            readable.append(store.manifest(name))
        except CacheNotFound:
            continue  # forgotten meanwhile
        except UnsupportedFormat as error:
            report.findings.append(_newer(name, error))
        except (StoreError, ValueError) as error:
            report.findings.append(
                Finding(
                    fault=Fault.MANIFEST,
                    path=name,
                    what=str(error),
                    advice="submit the prompt again, or forget the cache with `kvq rm`",
                )
            )
    report.caches = len(readable)
    return readable


def _blocks(
    store: Store, deep: bool, repair: bool, report: VerifyReport, on_progress: OnProgress
) -> set[tuple[str, bytes]]:
    """(space, key) of every block whose rows are there and whole."""
    whole: set[tuple[str, bytes]] = set()

    def check(job: tuple[Node, BlockName, BlockFile]) -> StoreError | None:
        try:
            _check(*job, deep=deep)
        except FileNotFoundError:
            return None  # a sweep or a rename took it meanwhile
        except (DamagedFile, UnsupportedFormat) as error:
            return error
        return None

    def jobs() -> Iterator[tuple[Node, BlockName, BlockFile]]:
        for node in nodes(store.path):
            report.leftovers += len(node.temps) + len(node.aside)
            for block, files in node.blocks.items():
                for file in files:
                    report.leftovers += file.checkpoint
                    yield node, block, file

    for (node, block, file), error in ordered(check, jobs(), threads=_THREADS, name="kvq-verify"):
        report.files += 1
        report.nbytes += file.nbytes
        on_progress(report.files, report.nbytes)
        if isinstance(error, DamagedFile):
            moved = repair and store.quarantine(error)
            report.findings.append(_damaged(error, moved=moved))
        elif error is not None:
            report.findings.append(_newer(str(file.path), error))
        elif file.record == "kv":
            whole.add((node.space, block.key))
    return whole


def _check(node: Node, block: BlockName, file: BlockFile, *, deep: bool) -> None:
    header = read_header(file.path)
    meta = header.meta
    place = (node.space, node.key, file.record, block.key, block.n, block.first)
    told = (meta.space, meta.parent, meta.record, meta.key, *_size_and_code(header, block))
    if place != told:
        raise DamagedFile(str(file.path), "the header does not belong to the file's name")
    if deep:
        check_data(header)


def _size_and_code(header: Header, block: BlockName) -> tuple[int, str]:
    ids = header.meta.token_ids
    if not len(ids):
        return 0, ""
    named = BlockName.of(block.parent, ids)
    return named.n, named.first


def _damaged(error: DamagedFile, *, moved: bool) -> Finding:
    advice = (
        "it is in quarantine now; submit the prompts that need it again"
        if moved
        else "run `kvq verify --repair` to put it aside, then submit the prompts again"
    )
    return Finding(
        fault=Fault.DAMAGED, path=error.path, what=error.reason, advice=advice, moved=moved
    )


def _newer(path: str, error: StoreError) -> Finding:
    return Finding(
        fault=Fault.NEWER, path=path, what=str(error), advice="upgrade kvq on this machine"
    )


def _incomplete(manifest: Manifest, missing: list[BlockName]) -> Finding:
    count = "1 block" if len(missing) == 1 else f"{len(missing)} blocks"
    return Finding(
        fault=Fault.INCOMPLETE,
        path=manifest.name,
        what=f"{count} of {len(manifest.blocks())} are missing or damaged",
        advice="submit the prompt again: what is left of it is reused",
    )
