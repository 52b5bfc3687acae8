"""The models of a worker, between its jobs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinymodel import tiny_model

from kvq.settings import Settings
from kvq.store import Store
from kvq_worker.models import Models


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_the_collection_after_a_job_leaves_out_what_was_imported(tmp_path: Path) -> None:
    models = Models(Settings.from_env({}))

    def run(name: str) -> None:
        models.run(
            Store.create(tmp_path / name),
            str(tiny_model(tmp_path / f"{name}-model")),
            None,
            on_chunk=lambda done, total: None,
            token_ids=[1, 2, 3, 4],
            name=name,
            codec="raw",
        )
        models.give_back()

    run("first")
    assert gc.get_freeze_count() > 10_000
    (prefiller,) = models._prefillers.values()
    weights = weakref.ref(prefiller.llm.model)
    del prefiller
    models.drop_all()
    assert weights() is None
    run("second")
