"""The README's example, run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commandline import CommandLine
from servers import Server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = README.split("<!-- example: tests/acceptance/test_readme.py", 1)[1]


def block(language: str) -> str:
    """The first code block of that language after the example's mark."""
    found = re.search(rf"^```{language}\n(.*?)^```$", EXAMPLE, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.model
def test_producer_worker_and_app_work_as_the_readme_shows(demo_model: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "server") as server:
        variables = {"MODEL": str(demo_model), "STORE": str(tmp_path / "store")}
        environment = CommandLine(tmp_path, KVQ_REDIS_URL=server.url, **variables).environment

        def run(*command: str) -> str:
            done = subprocess.run(
                command,
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            return done.stdout

        said = run("sh", "-e", "-c", block("sh"))
        app = run(sys.executable, "-c", block("python"))

    assert "harbour" in said
    assert said.count('"status_code": 200') == 2
    text, counts = app.strip().rsplit("\n", 1)
    reused, total = map(int, re.findall(r"\d+", counts))
    assert reused == total > 15  # the very prompt is stored, with the logits after its last token
    assert len(text.split()) > 3


def test_every_extra_in_it_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"kvq\[([a-z,-]+)\]", README))
    assert named
    assert {one for extras in named for one in extras.split(",")} <= set(
        project["optional-dependencies"]
    )
