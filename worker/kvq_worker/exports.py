"""Stock mlx-lm files that a job leaves besides its blocks. The operator says where they may go.

A stock file has a name and contents that whoever submits decides, so a worker writes them below one
folder only, and none at all unless it was given that folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvq.errors import InvalidMessage, StoreUnavailable
from kvq.store.store import Store


def export_folder(wanted: str | None, allowed: Path | None) -> Path | None:
    """The folder of a job's stock files, made below `allowed` if need be; None for none wanted.

    Raises InvalidMessage for a folder that is not `allowed` or in it, StoreUnavailable where
    `allowed` is gone or read-only.
    """
    if wanted is None:
        return None
    if allowed is None:
        raise InvalidMessage(
            "the job wants stock files, and this worker writes none: set KVQ_EXPORT to the folder "
            "that it may write them to"
        )
    folder = Path(wanted).resolve()
    if not folder.is_relative_to(allowed.resolve()):
        raise InvalidMessage(f"this worker writes stock files to {allowed} only, not to {wanted}")
    if not allowed.is_dir():
        raise StoreUnavailable(f"KVQ_EXPORT is {allowed}, and there is no such folder here")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"{folder} cannot be made: {error.strerror}") from error
    return folder


def write_stock_files(
    store: Store, names: Sequence[str], folder: Path, *, check: Callable[[], None]
) -> None:
    """Write `<name>.safetensors` for each of the caches `names`; `check` may end it before each.

    Raises CacheError, StoreError.
    """
    from kvq.exchange import export_cache

    for name in names:
        check()
        export_cache(store, name, folder / f"{name}.safetensors")
