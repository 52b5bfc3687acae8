"""The worker: takes prefill jobs from RQ's queue. Imports without MLX, RQ and Redis."""

from __future__ import annotations

from typing import Any

__all__ = ["KvqJob", "ResidentWorker"]


def __getattr__(name: str) -> Any:
    # RQ finds its worker and job classes by dotted names; only then is RQ needed.
    if name == "ResidentWorker":
        from kvq_worker.worker import ResidentWorker

        return ResidentWorker
    if name == "KvqJob":
        from kvq_worker.job import KvqJob

        return KvqJob
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
