from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvq.errors import InvalidSetting, MissingExtra
from kvq_worker import environment
from kvq_worker.environment import RQ_CLASSES, worker_command, worker_environment
from kvq_worker.models import allowed


@pytest.fixture(autouse=True)
def blas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    library = tmp_path / "libopenblas.so.0"
    library.touch()
    monkeypatch.setattr(environment, "openblas", lambda: str(library))
    return library


def test_rq_is_told_everything_by_variables(blas: Path) -> None:
    made = worker_environment({"KVQ_REDIS_URL": "redis://h:1/0", "KVQ_QUEUE": "night", "X": "y"})
    assert RQ_CLASSES.items() <= made.items()
    assert made["RQ_REDIS_URL"] == "redis://h:1/0"
    assert made["X"] == "y"
    assert made["LD_PRELOAD"] == str(blas)
    assert worker_command(made, "--burst") == [
        sys.executable, "-m", "rq.cli", "worker", "--burst", "night",
    ]  # fmt: skip


def test_every_class_that_rq_is_told_of_is_there() -> None:
    from rq.utils import import_attribute

    for name in RQ_CLASSES.values():
        assert isinstance(import_attribute(name), type)


def test_what_is_set_already_stays() -> None:
    made = worker_environment({"LD_PRELOAD": "/mine.so", "RQ_REDIS_URL": "redis://b"})
    assert made["LD_PRELOAD"] == "/mine.so"
    assert made["RQ_REDIS_URL"] == "redis://b"


@pytest.mark.parametrize(
    ("cpuinfo", "kernels"),
    [
        ("flags\t\t: sse avx2 fma avx512f avx512cd avx512bw avx512dq avx512vl\n", "SkylakeX"),
        ("processor: 0\nflags\t\t: sse avx2 fma avx512f\n", "Haswell"),
        ("flags\t\t: sse sse2 avx\n", None),
        ("Features\t: fp asimd\n", None),
        ("", None),
    ],
)
def test_openblas_is_told_what_the_processor_can_do(
    tmp_path: Path, cpuinfo: str, kernels: str | None
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert environment.openblas_kernels(str(tmp_path / "cpuinfo")) == kernels
    assert environment.openblas_kernels(str(tmp_path / "none")) is None


def test_other_kernels_than_ours_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "openblas_kernels", lambda: "Haswell")
    assert worker_environment({})["OPENBLAS_CORETYPE"] == "Haswell"
    assert worker_environment({"OPENBLAS_CORETYPE": "Zen"})["OPENBLAS_CORETYPE"] == "Zen"
    # The library that somebody else chose is theirs to tune.
    assert "OPENBLAS_CORETYPE" not in worker_environment({"LD_PRELOAD": "/mine.so"})


def test_a_bad_setting_stops_the_worker_before_it_starts() -> None:
    with pytest.raises(InvalidSetting, match="KVQ_LEASE"):
        worker_environment({"KVQ_LEASE": "soon"})
    with pytest.raises(InvalidSetting, match="KVQ_REDIS_URL"):
        worker_environment({"KVQ_REDIS_URL": "http://h"})


def test_without_rq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"kvq\[worker\]"):
        worker_environment({})


@pytest.mark.parametrize(
    ("name", "patterns", "admitted"),
    [
        ("org/model", ("*",), True),
        ("org/model", ("org/*",), True),
        ("org/model", ("other/*", "org/model"), True),
        ("Org/model", ("org/*",), False),
        ("/models/a", ("/models/*",), True),
        ("/models/../etc", ("/models/*",), False),
        ("../x", ("*",), False),
        ("org/model", (), False),
    ],
)
def test_globs_of_models(name: str, patterns: tuple[str, ...], admitted: bool) -> None:
    assert allowed(name, patterns) is admitted


def test_run_admits_its_own_models_only() -> None:
    from kvq_producer.run import _as_glob

    for name in ("org/model", "/a b/[x]*?", "with,comma"):
        pattern = _as_glob(name)
        assert "," not in pattern
        assert allowed(name, (pattern,))
    assert not allowed("/a b/xyz", (_as_glob("/a b/[x]*?"),))
