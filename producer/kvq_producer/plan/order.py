"""The order in which jobs are offered to workers."""

from __future__ import annotations

from kvq_producer.plan.jobs import Draft
from kvq_producer.plan.values import Group


def in_order(drafts: list[Draft]) -> list[Draft]:
    """`drafts` so that none comes before its parent; sets every draft's `place`.

    Higher priority goes first. Within a priority: jobs that others wait for, the one with the
    longest chain of work below it first, so that none is left for the end, when the other workers
    would idle; then prompts that share nothing, long ones first, which keep all workers busy
    meanwhile; then the prompts below the shared ones, family by family, so that a prefix is still
    in a worker's memory for the next. Within each of the three, a model's jobs are together.
    """
    models = _ranks([draft.group for draft in drafts])

    def rank(draft: Draft) -> tuple[int, ...]:
        stage = 0 if draft.is_parent else 2 if draft.parent else 1
        family = draft.parent.place if draft.parent and stage == 2 else 0
        return (
            -draft.priority,
            stage,
            models[draft.group],
            family,
            -draft.critical_tokens,
            draft.tokens,
            draft.prompt,
        )

    waited_for = sorted((draft for draft in drafts if draft.is_parent), key=rank)
    for place, draft in enumerate(waited_for):
        draft.place = place
    ordered = sorted(drafts, key=rank)
    for place, draft in enumerate(ordered):
        draft.place = place
    return ordered


def _ranks(groups: list[Group]) -> dict[Group, int]:
    """Groups numbered by first appearance, those of one model next to each other."""
    seen = dict.fromkeys(groups)
    models = {model: rank for rank, model in enumerate(dict.fromkeys(one.model for one in seen))}
    by_model = sorted(seen, key=lambda one: models[one.model])
    return {group: rank for rank, group in enumerate(by_model)}
