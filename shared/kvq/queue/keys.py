"""Names of everything kvq and RQ keep in Redis.

RQ's are spelled out here so that a producer need not import RQ; a test holds them against RQ's own.
"""

from __future__ import annotations

import os

#: RQ's prefix, which RQ itself takes from the same variable.
RQ = os.environ.get("RQ_KEY_PREFIX", "rq")

QUEUES = f"{RQ}:queues"
WORKERS = f"{RQ}:workers"
JOB_PREFIX = f"{RQ}:job:"
RESULTS_PREFIX = f"{RQ}:results:"
#: All batches, scored by when they were submitted.
BATCHES = "kvq:batches"

# Fields that kvq adds to RQ's hash of a job.
#: Ids of the batches that want the job, comma-separated.
FIELD_BATCHES = "kvq_batches"
#: Set when no batch wants it any more while it runs.
FIELD_CANCEL = "kvq_cancel"
#: `stored` or `failed`, once it has finished.
FIELD_OUTCOME = "kvq_outcome"
#: Tokens done and tokens in all, while it runs.
FIELD_DONE = "kvq_done"
FIELD_TOTAL = "kvq_total"


def job(job_id: str) -> str:
    return JOB_PREFIX + job_id


def dependents(job_id: str) -> str:
    """Set of the jobs that wait for this one."""
    return f"{JOB_PREFIX}{job_id}:dependents"


def dependencies(job_id: str) -> str:
    """Set of the jobs that this one waits for. RQ has two colons there."""
    return f"{JOB_PREFIX}:{job_id}:dependencies"


def results(job_id: str) -> str:
    """Stream of a job's results, the newest last."""
    return RESULTS_PREFIX + job_id


def queue(name: str) -> str:
    return f"{RQ}:queue:{name}"


def intermediate(name: str) -> str:
    """List of jobs that a worker has popped but not started yet."""
    return f"{RQ}:queue:{name}:intermediate"


def registry(kind: str, name: str) -> str:
    """A queue's registry: wip, deferred, finished, failed or canceled."""
    return f"{RQ}:{kind}:{name}"


def batch(batch_id: str) -> str:
    """Hash of a batch's facts."""
    return f"kvq:batch:{batch_id}"


def entries(batch_id: str) -> str:
    """Hash of a batch's prompts and prefixes, in numbered pieces."""
    return f"kvq:batch:{batch_id}:entries"
