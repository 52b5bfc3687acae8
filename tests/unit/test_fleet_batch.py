"""How long the benchmark `fleet` says that a batch takes at least."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.fleet_batch import longest_chain, shortest

from kvq_producer.plan import Group, PlannedJob, TokenizedPrompt, make_plan


def jobs_of(*prompts: list[int]) -> tuple[PlannedJob, ...]:
    given = [
        TokenizedPrompt(custom_id=str(n), group=Group(model="m"), ids=np.array(ids, np.uint32))
        for n, ids in enumerate(prompts)
    ]
    with make_plan(given, align=1) as plan:
        return plan.jobs


SHARED = [1] * 400
#: A prefix of 400 tokens and below it 100, 100 and 200; 600 tokens alone.
JOBS = jobs_of(
    [*SHARED, *[2] * 100], [*SHARED, *[3] * 100], [*SHARED, *[4] * 200], [5] * 600
)  # fmt: skip


def test_one_worker_takes_the_sum_and_many_the_longest_chain() -> None:
    assert len(JOBS) == 5
    assert shortest(JOBS, 1, rate=100, cost=0.0) == pytest.approx(14)
    assert shortest(JOBS, 9, rate=100, cost=0.0) == pytest.approx(6)
    assert longest_chain(JOBS, rate=100) == pytest.approx(6)


def test_two_workers_begin_with_what_others_wait_for() -> None:
    # 4 + 2 + 1 seconds on one, 6 + 1 on the other.
    assert shortest(JOBS, 2, rate=100, cost=0.0) == pytest.approx(7)


def test_each_job_costs_something_beside_its_tokens() -> None:
    assert shortest(JOBS, 1, rate=100, cost=0.5) == pytest.approx(16.5)
