"""Planning a batch: prompts in, jobs out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from types import TracebackType

from kvq.store.keys import BLOCK, TokenIds, pack
from kvq_producer.plan.batch import Batch
from kvq_producer.plan.jobs import Draft, draft_jobs
from kvq_producer.plan.order import in_order
from kvq_producer.plan.spool import Spool
from kvq_producer.plan.values import (
    AlreadyStored,
    GroupTotals,
    JobKind,
    PlannedJob,
    StoredLookup,
    TokenizedPrompt,
    Totals,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The jobs of a batch in the order to submit them, parents before children.

    Holds a temporary file with the token ids: a context manager, closed by `close`.
    """

    jobs: tuple[PlannedJob, ...]
    done: tuple[AlreadyStored, ...]
    groups: tuple[GroupTotals, ...]
    spool: Spool = field(repr=False, compare=False)

    @property
    def totals(self) -> Totals:
        """The totals of all groups together."""
        return reduce(add, (one.totals for one in self.groups), Totals())

    def ids(self, job: PlannedJob, start: int = 0) -> TokenIds:
        """The job's token ids from position `start` on, uint32, read from the temporary file."""
        return self.spool.ids(job.offset + start, job.tokens - start)

    def packed(self, job: PlannedJob, start: int = 0) -> bytes:
        """The same as little-endian unsigned 32-bit integers."""
        return pack(self.ids(job, start))

    def close(self) -> None:
        """Give up the token ids; `ids` and `packed` cannot be asked any more."""
        self.spool.close()

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def make_plan(
    prompts: Iterable[TokenizedPrompt],
    *,
    stored: StoredLookup | None = None,
    align: int = BLOCK,
    folder: str | None = None,
) -> Plan:
    """Plan a batch. The same prompts in the same order always give the same plan.

    `prompts` is read once, and no prompt is held in memory: the token ids go to a temporary file
    in `folder` (default: the system's), 4 bytes each. Without `stored` the store counts as empty.
    Prefix jobs end at multiples of `align` tokens: whole blocks, or with 1 right where prompts
    part, which prefills nothing twice but leaves a partial block beside those of the prompts.

    Raises UsageError for a prompt without tokens and when `folder` is full; what `stored` raises.
    """
    spool = Spool(folder)
    try:
        batch = Batch(spool)
        for prompt in prompts:
            batch.add(prompt)
        drafts: list[Draft] = []
        done: list[AlreadyStored] = []
        totals: list[GroupTotals] = []
        for group in batch.groups:
            jobs, complete, counts = draft_jobs(batch, group, stored, align)
            drafts += jobs
            done += (
                AlreadyStored(
                    key=batch.keys[one],
                    group=group,
                    tokens=batch.lengths[one],
                    custom_ids=batch.custom_ids(one),
                )
                for one in sorted(complete)
            )
            totals.append(GroupTotals(group=group, totals=counts))
        jobs_in_order = tuple(_planned(batch, draft) for draft in in_order(drafts))
    except BaseException:
        spool.close()
        raise
    return Plan(jobs=jobs_in_order, done=tuple(done), groups=tuple(totals), spool=spool)


def _planned(batch: Batch, draft: Draft) -> PlannedJob:
    is_prompt = draft.kind is JobKind.PROMPT
    return PlannedJob(
        kind=draft.kind,
        key=batch.keys[draft.prompt] if is_prompt else batch.prefix_key(draft.prompt, draft.tokens),
        group=draft.group,
        tokens=draft.tokens,
        prefill_tokens=draft.prefill_tokens,
        parent=None if draft.parent is None else draft.parent.place,
        keep=draft.keep,
        custom_ids=batch.custom_ids(draft.prompt) if is_prompt else (),
        serves=draft.serves,
        critical_tokens=draft.critical_tokens,
        priority=draft.priority,
        offset=batch.offsets[draft.prompt],
    )
