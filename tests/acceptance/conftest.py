from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvq_producer.demo import prepare

# Read before any fixture clears the environment for its test.
DEMO_MODEL = Path(
    os.environ.get("KVQ_DEMO_MODEL", Path(__file__).parents[2] / ".demo" / "gemma-3-270m")
)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the real demo model; prepared here when `make demo-model` has not been run."""
    return DEMO_MODEL if DEMO_MODEL.exists() else prepare(DEMO_MODEL)
