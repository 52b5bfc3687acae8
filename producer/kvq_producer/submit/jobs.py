"""A plan's jobs as they go into the queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kvq.queue.enqueue import JobToEnqueue
from kvq.queue.entries import Entry
from kvq.queue.messages import PrefillMessage
from kvq.queue.shared_ids import SharedPrefix
from kvq_producer.plan import JobKind, PlannedJob
from kvq_producer.submit.intake import Intake
from kvq_producer.submit.wish import Wanted, Wish, caches_of

#: A prefix shorter than this (tokens) is quicker repeated than fetched.
_WORTH_SHARING = 64


@dataclass(frozen=True, kw_only=True)
class Work:
    """The jobs of `intake` as `wish` wants them; ids of tokens are read when a job is made."""

    intake: Intake
    wish: Wish
    batch: str
    #: Run again what a finished job of the same work says is done.
    again: bool = False

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Ids of all jobs, in the order of the plan."""
        return tuple(self._message(job).job_id(job.key) for job in self.intake.plan.jobs)

    @cached_property
    def _shared(self) -> frozenset[int]:
        """Places of jobs whose ids are kept in Redis once, for those that go on from them."""
        jobs = self.intake.plan.jobs
        parents = {job.parent for job in jobs if job.parent is not None}
        return frozenset(one for one in parents if jobs[one].tokens >= _WORTH_SHARING)

    def jobs(self, start: int, stop: int) -> Iterator[tuple[JobToEnqueue, SharedPrefix | None]]:
        """The jobs from place `start` to before `stop`, each with the prefix whose ids it shares.

        Of a prefix, `packed` gives the ids.
        """
        plan = self.intake.plan
        for place in range(start, min(stop, len(plan.jobs))):
            job = plan.jobs[place]
            base = place if place in self._shared else job.parent
            prefix = self.prefix(base) if base in self._shared and base is not None else None
            shared_tokens = prefix.tokens if prefix else 0
            tail = plan.packed(job, shared_tokens) if shared_tokens < job.tokens else b""
            yield (
                JobToEnqueue(
                    id=self.ids[place],
                    message=self._message(job, prefix, tail),
                    parents=() if job.parent is None else (self.ids[job.parent],),
                    front=job.priority > 0,
                    trust=not self.again and not self._looked_up(job),
                ),
                prefix,
            )

    def prefix(self, place: int) -> SharedPrefix:
        """The ids of the job at `place` as others refer to them."""
        if place not in self._prefixes:
            packed = self.intake.plan.packed(self.intake.plan.jobs[place])
            self._prefixes[place] = SharedPrefix.of(packed)
        return self._prefixes[place]

    @cached_property
    def _prefixes(self) -> dict[int, SharedPrefix]:
        return {}

    @cached_property
    def places(self) -> dict[SharedPrefix, int]:
        """Where the prefix that a job shares is in the plan."""
        return {self.prefix(place): place for place in self._shared}

    def packed(self, prefix: SharedPrefix) -> bytes:
        """The packed ids of a prefix."""
        return self.intake.plan.packed(self.intake.plan.jobs[self.places[prefix]])

    def entries(self) -> tuple[list[Entry], list[Entry]]:
        """The batch's prompts in the order of the file, and its prefixes in that of the plan."""
        of_prompt: dict[str, Entry] = {}
        prefixes: list[Entry] = []
        for place, job in enumerate(self.intake.plan.jobs):
            job_id, work = self.ids[place], job.prefill_tokens
            if job.kind is JobKind.PREFIX:
                prefixes.append(
                    Entry(custom_id=None, job_id=job_id, name=None, tokens=job.tokens, work=work)
                )
                continue
            _, names = caches_of(self._wanted(job.custom_ids), job.group, job.key)
            for custom_id, name in zip(job.custom_ids, names, strict=True):
                of_prompt[custom_id] = Entry(
                    custom_id=custom_id, job_id=job_id, name=name, tokens=job.tokens, work=work
                )
                work = 0
        for done in self.intake.plan.done:
            assert self.intake.lookup is not None
            _, names = caches_of(self._wanted(done.custom_ids), done.group, done.key)
            for custom_id, name in zip(done.custom_ids, names, strict=True):
                of_prompt[custom_id] = Entry(
                    custom_id=custom_id,
                    job_id=None,
                    name=name,
                    tokens=done.tokens,
                    work=0,
                    facts=self.intake.lookup.facts(done.group, name),
                )
        return [of_prompt[one] for one in self.intake.wanted if one in of_prompt], prefixes

    def _message(
        self, job: PlannedJob, prefix: SharedPrefix | None = None, tail: bytes = b""
    ) -> PrefillMessage:
        """The job's message; its id can be told without token ids."""
        wanted = self._wanted(job.custom_ids)
        caches, _ = caches_of(wanted, job.group, job.key)
        keep = {*job.keep, *(position for one in wanted for position in one.keep)}
        return PrefillMessage(
            model=job.group.model,
            adapter=job.group.adapter,
            store=self.wish.store,
            codec=job.group.codec,
            prefix=prefix,
            tail=tail,
            caches=caches,
            keep=tuple(sorted(keep)),
            window_records=self.wish.window_records,
            keep_every=self.wish.keep_every,
            max_kl=self.wish.max_kl,
            export=self.wish.export if caches else None,
            custom_ids=job.custom_ids[:100],
            batch=self.batch,
        )

    def _wanted(self, custom_ids: tuple[str, ...]) -> list[Wanted]:
        return [self.intake.wanted[one] for one in custom_ids]

    def _looked_up(self, job: PlannedJob) -> bool:
        return self.intake.lookup is not None and self.intake.lookup.knows(job.group)
