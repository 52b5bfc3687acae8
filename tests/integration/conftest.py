from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server
from workers import Fleet

from kvq.queue.connection import PatientRedis
from kvq.store.store import Store


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "server") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[PatientRedis]:
    connection = server.client()
    yield connection
    connection.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def fleet(tmp_path: Path, server: Server, store: Store) -> Iterator[Fleet]:
    workers = Fleet(tmp_path, server, store)
    yield workers
    for worker in workers.workers:
        if worker.alive:
            worker.kill()
