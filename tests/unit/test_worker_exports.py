"""Where a worker may leave stock files: in the operator's folder, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvq.errors import InvalidMessage, StoreUnavailable
from kvq.queue.messages import CacheToWrite, PrefillMessage
from kvq_worker.exports import export_folder


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def test_without_a_wish_there_is_no_folder(allowed: Path) -> None:
    assert export_folder(None, allowed) is None
    assert export_folder(None, None) is None


def test_the_folder_itself_and_folders_in_it_are_taken(allowed: Path) -> None:
    assert export_folder(str(allowed), allowed) == allowed
    assert export_folder(str(allowed / "a" / "b"), allowed) == allowed / "a" / "b"
    assert (allowed / "a" / "b").is_dir()


def test_a_worker_without_such_a_folder_writes_none(allowed: Path) -> None:
    with pytest.raises(InvalidMessage, match="set KVQ_EXPORT"):
        export_folder(str(allowed), None)


@pytest.mark.parametrize("wanted", ["..", "../other", "a/../..", "/etc", "link", "link/x"])
def test_a_way_out_of_the_folder_is_refused(allowed: Path, wanted: str) -> None:
    (allowed / "link").symlink_to(allowed.parent)
    with pytest.raises(InvalidMessage, match=f"to {allowed} only"):
        export_folder(str(allowed / wanted), allowed)
    assert sorted(path.name for path in allowed.parent.iterdir()) == ["files"]


def test_a_folder_beside_it_with_a_longer_name_is_refused(allowed: Path) -> None:
    with pytest.raises(InvalidMessage):
        export_folder(f"{allowed}-other", allowed)


def test_a_share_that_is_not_mounted_is_the_machines_fault(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(StoreUnavailable, match="no such folder"):
        export_folder(str(gone / "a"), gone)
    assert not gone.exists()


def message(**facts: Any) -> PrefillMessage:
    return PrefillMessage(model="m", tail=bytes(4), caches=(CacheToWrite(name="a"),), **facts)


def test_the_message_says_it_and_it_is_other_work() -> None:
    plain, with_files = message(), message(export="/files")
    assert PrefillMessage.decode(with_files.encode()) == with_files
    assert "export" not in plain.encode()
    assert plain.job_id(b"x") != with_files.job_id(b"x")


@pytest.mark.parametrize("export", [7, "", "a\nb", "x" * 5000, ["/files"]])
def test_a_message_with_another_export_is_refused(export: Any) -> None:
    with pytest.raises(InvalidMessage, match="export"):
        PrefillMessage.decode({**message().encode(), "export": export})
