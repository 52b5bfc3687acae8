"""The three packages keep their places: who imports whom, and what imports without MLX or RQ."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "kvq": ROOT / "shared" / "kvq",
    "kvq_worker": ROOT / "worker" / "kvq_worker",
    "kvq_producer": ROOT / "producer" / "kvq_producer",
}
HEAVY = ("mlx", "mlx_lm", "rq", "redis", "transformers")

#: Parts that must import on a machine without MLX.
WITHOUT_MLX = [
    *sorted((FOLDERS["kvq"] / "store").rglob("*.py")),
    *sorted((FOLDERS["kvq"] / "queue").rglob("*.py")),
    *sorted(path for path in (FOLDERS["kvq"] / "model").rglob("*.py") if path.name != "loading.py"),
    *sorted(FOLDERS["kvq"].glob("*.py")),
    *sorted(FOLDERS["kvq_producer"].rglob("*.py")),
]


def modules(package: str) -> list[Path]:
    return sorted(FOLDERS[package].rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level package of each import statement under `tree`, whatever its depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def imported_at_once(tree: ast.Module) -> set[str]:
    """The packages that running the module imports: not those named in functions, nor for types."""
    found: set[str] = set()
    for node in _run_at_once(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(imported(node))
    return found


def _run_at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _run_at_once(node.orelse)
            continue
        yield node
        for part in ("body", "orelse", "finalbody"):
            yield from _run_at_once(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _run_at_once(handler.body)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def test_the_walk_sees_what_runs_and_only_that() -> None:
    tree = ast.parse(
        "import a\n"
        "if TYPE_CHECKING:\n    import b\nelse:\n    import c\n"
        "try:\n    import d.e\nexcept ImportError:\n    from f import g\n"
        "class K:\n    import h\n    def m(self):\n        import i\n"
        "def n():\n    import j\n"
    )
    assert imported_at_once(tree) == set("acdfh")
    assert set(imported(tree)) == set("abcdfhij")


def test_the_library_imports_neither_worker_nor_producer() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules("kvq")
        for name in imported(parse(path))
        if name in ("kvq_worker", "kvq_producer")
    }
    assert wrong == set()


@pytest.mark.parametrize(
    ("package", "other"), [("kvq_worker", "kvq_producer"), ("kvq_producer", "kvq_worker")]
)
def test_worker_and_producer_do_not_import_each_other(package: str, other: str) -> None:
    wrong = {
        str(path.relative_to(ROOT))
        for path in modules(package)
        if other in imported_at_once(parse(path))
    }
    assert wrong == set()


@pytest.mark.parametrize("path", WITHOUT_MLX, ids=lambda path: str(path.relative_to(ROOT)))
def test_this_part_does_not_need_mlx(path: Path) -> None:
    assert imported_at_once(parse(path)).isdisjoint({"mlx", "mlx_lm"})


IMPORT_WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
import {module}
"""


@pytest.mark.parametrize(
    "module", ["kvq", "kvq_producer", "kvq_producer.cli", "kvq_producer.demo", "kvq_worker.jobs"]
)
def test_it_imports_without_mlx_rq_redis_and_transformers(module: str) -> None:
    code = IMPORT_WITHOUT.format(heavy=HEAVY, module=module)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""


@pytest.mark.parametrize("package", FOLDERS)
def test_the_package_says_that_it_is_typed(package: str) -> None:
    assert (FOLDERS[package] / "py.typed").is_file()


def test_no_package_is_named_by_its_folder() -> None:
    # From the top folder Python finds them under these names too, as second copies of the modules.
    second_copy = re.compile(r"\b(shared|worker|producer)\.kvq")
    places = ["shared", "worker", "producer", "tests", "deploy", "Makefile", "pyproject.toml"]
    files = [
        path
        for place in places
        for path in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
        if path.suffix in {".py", ".toml", ".md", ".sh", ".plist", ".service", ".yml", ".yaml", ""}
        and path.is_file()
    ]
    wrong = {
        str(path.relative_to(ROOT))
        for path in files
        if second_copy.search(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert wrong == set()
