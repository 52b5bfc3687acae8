from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server

from kvq.queue.connection import PatientRedis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "server") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[PatientRedis]:
    connection = server.client()
    yield connection
    connection.close()
