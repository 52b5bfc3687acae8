"""The planner: from a batch of tokenized prompts to jobs that compute every shared prefix once."""

from __future__ import annotations

from kvq_producer.plan.planner import Plan, make_plan
from kvq_producer.plan.values import (
    AlreadyStored,
    Group,
    GroupTotals,
    JobKind,
    PlannedJob,
    Stored,
    StoredLookup,
    TokenizedPrompt,
    Totals,
)

__all__ = [
    "AlreadyStored",
    "Group",
    "GroupTotals",
    "JobKind",
    "Plan",
    "PlannedJob",
    "Stored",
    "StoredLookup",
    "TokenizedPrompt",
    "Totals",
    "make_plan",
]
