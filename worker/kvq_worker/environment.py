"""What makes a plain `rq worker` kvq's own: variables, and nothing else."""

from __future__ import annotations

import glob
import importlib.util
import sys
from collections.abc import Mapping

from kvq.errors import MissingExtra
from kvq.queue.urls import find_url
from kvq.settings import Settings

#: Classes that RQ is told to use.
RQ_CLASSES = {
    "RQ_WORKER_CLASS": "kvq_worker.ResidentWorker",
    "RQ_JOB_CLASS": "kvq_worker.KvqJob",
    "RQ_CONNECTION_CLASS": "kvq.queue.connection.PatientRedis",
}
_OPENBLAS = (
    "/usr/lib/*-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib64/libopenblas.so.0",
)


def worker_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` and what a worker process needs. Raises InvalidSetting, MissingExtra.

    On Linux, OpenBLAS is put before the BLAS that MLX brings, which is some thirty times slower.
    """
    Settings.from_env(base)
    for package in ("rq", "redis"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "worker")
    environment = {**base, **RQ_CLASSES}
    environment["RQ_REDIS_URL"] = find_url(None, base)
    if (library := openblas()) is not None and not environment.get("LD_PRELOAD"):
        environment["LD_PRELOAD"] = library
        if (kernels := openblas_kernels()) is not None:
            environment.setdefault("OPENBLAS_CORETYPE", kernels)
    # A worker's log is read while it runs.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def worker_command(environment: Mapping[str, str], *options: str) -> list[str]:
    """The program and arguments of a worker process with that environment."""
    queue = Settings.from_env(environment).queue
    return [sys.executable, "-m", "rq.cli", "worker", *options, queue]


def openblas() -> str | None:
    """Path of a threaded OpenBLAS on this Linux machine, None without one or elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    found = (path for pattern in _OPENBLAS for path in sorted(glob.glob(pattern)))
    return next(found, None)


def openblas_kernels(cpuinfo: str = "/proc/cpuinfo") -> str | None:
    """The best of OpenBLAS's kernels that an x86 processor can run, None where that is unknown.

    OpenBLAS tells processors by their model number. One newer than itself gets kernels of 2004,
    several times slower, whatever it can do.
    """
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return None
    if {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"} <= set(flags):
        return "SkylakeX"
    return "Haswell" if {"avx2", "fma"} <= set(flags) else None
