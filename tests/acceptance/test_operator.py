"""What a new operator does first: a whole fleet on one machine, and everything that can happen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers import free_port
from tinymodel import tiny_model

from kvq_producer.valkey import find_server

SCRIPT = Path(__file__).parents[2] / "deploy" / "rehearse.sh"


@pytest.mark.slow
def test_the_rehearsal_loses_nothing(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "RQ_", "REDIS_"))}
    ran = subprocess.run(
        ["sh", str(SCRIPT), str(model), str(tmp_path / "fleet")],
        env={
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VALKEY_SERVER": find_server(),
            "PORT": str(free_port()),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "== nothing was lost"
    assert "40 stored already, 0 jobs" in ran.stdout
    assert not (tmp_path / "fleet").exists()


def test_without_a_model_it_says_how_it_is_used(tmp_path: Path) -> None:
    ran = subprocess.run(["sh", str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "rehearse.sh MODEL [FOLDER]" in ran.stdout
