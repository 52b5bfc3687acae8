"""Every metric that kvq serves. What collects them, and what documents them, goes by this table."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Prometheus' types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """A metric's name without the endings that its type adds, its labels, and what it says."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    doc: str

    @property
    def shown(self) -> str:
        """The name as Prometheus knows it."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


_G, _C, _H = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM
_QUEUE, _OF_RESULT = ("queue",), ("queue", "model", "codec")

# fmt: off
REDIS_UP = Metric("kvq_redis_up", _G, (), "1 while Redis answers, else 0")
REDIS_MEMORY = Metric("kvq_redis_memory_bytes", _G, (), "memory that Redis uses")
BATCHES = Metric("kvq_batches", _G, (), "batches that are remembered")
JOBS = Metric("kvq_jobs", _G, ("queue", "state"),
              "jobs in Redis: waiting, deferred (for a prefix), running, finished, failed")
OLDEST = Metric("kvq_oldest_waiting_job_seconds", _G, _QUEUE,
                "how long the oldest of the next 100 jobs has waited; 0 when none waits")
WORKERS = Metric("kvq_workers", _G, ("queue", "state", "model"),
                 "workers that listen; the model is that of the last prompt that each stored")
STORED = Metric("kvq_jobs_stored", _C, _OF_RESULT, "jobs whose blocks and caches were stored")
CACHES = Metric("kvq_caches_written", _C, _OF_RESULT, "caches that jobs wrote")
FAILED = Metric("kvq_jobs_failed", _C, ("queue", "reason"), "jobs that failed for good")
RETRIED = Metric("kvq_jobs_retried", _C, _QUEUE, "runs that failed and were tried again")
TOKENS = Metric("kvq_prompt_tokens", _C, _OF_RESULT, "tokens of stored prompts and prefixes")
PREFILLED = Metric("kvq_prefilled_tokens", _C, _OF_RESULT, "tokens of these that were computed")
REUSED = Metric("kvq_reused_tokens", _C, _OF_RESULT, "tokens of these that were stored already")
PREFILL_SECONDS = Metric("kvq_prefill_seconds", _C, _OF_RESULT, "time that computing them took")
JOB_SECONDS = Metric("kvq_job_seconds", _C, _OF_RESULT, "time that these jobs took as a whole")
WRITTEN = Metric("kvq_written_bytes", _C, _OF_RESULT, "bytes that were written to stores")
REUSED_BYTES = Metric("kvq_reused_bytes", _C, _OF_RESULT,
                      "bytes of stored caches that were there already")
DIVERGENCE = Metric("kvq_cache_divergence_nats", _H, _OF_RESULT,
                    "how far lossy caches move the model's predictions: mean KL divergence of each")
STORE_UP = Metric("kvq_store_up", _G, ("store",), "1 while the store can be read, else 0")
STORE_FREE = Metric("kvq_store_free_bytes", _G, ("store",), "free space where the store is")
STORE_SIZE = Metric("kvq_store_disk_bytes", _G, ("store",), "size of the disk or share it is on")
STORE_BYTES = Metric("kvq_store_bytes", _G, ("store", "kind", "codec"),
                     "bytes of its files, by kind: kv, window, state, logits, checkpoint, "
                     "manifest, quarantine, other")
STORE_FILES = Metric("kvq_store_files", _G, ("store", "kind", "codec"), "number of its files")
STORE_WALKED = Metric("kvq_store_walked_timestamp_seconds", _G, ("store",),
                      "when its files were last counted")
STORE_WALK = Metric("kvq_store_walk_seconds", _G, ("store",), "how long counting them took")
BUILD = Metric("kvq_build_info", _G, ("version",), "1, with the version of kvq that serves this")
# fmt: on

METRICS = (
    REDIS_UP, REDIS_MEMORY, BATCHES, JOBS, OLDEST, WORKERS, STORED, CACHES, FAILED, RETRIED,
    TOKENS, PREFILLED, REUSED, PREFILL_SECONDS, JOB_SECONDS, WRITTEN, REUSED_BYTES, DIVERGENCE,
    STORE_UP, STORE_FREE, STORE_SIZE, STORE_BYTES, STORE_FILES, STORE_WALKED, STORE_WALK, BUILD,
)  # fmt: skip


def markdown() -> str:
    """Every metric as a Markdown table."""
    head = "| metric | labels | what it says |\n|---|---|---|\n"
    rows = (f"| `{one.shown}` | {', '.join(one.labels)} | {one.doc} |\n" for one in METRICS)
    return head + "".join(rows)
