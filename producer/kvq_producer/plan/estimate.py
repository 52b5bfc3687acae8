"""What a plan costs and brings: bytes on disk, seconds, and when the work has paid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvq.store.keys import BLOCK
from kvq.store.manifest import Manifest
from kvq_producer.plan.planner import Plan
from kvq_producer.plan.values import Group, JobKind, PlannedJob
from kvq_producer.sizes import CacheShape, known_codec

#: Bytes a second that the SSD of a small Mac mini reads, for a plan that is told no other rate.
DISK_RATE = 2.5e9
#: As in a prefill: besides its end, a cache keeps the last block boundary this far before it.
_REJOIN_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeping:
    """What is kept besides what the jobs say: as in a prefill request, and by custom id."""

    all_windows: bool = False
    keep_every: int | None = None
    positions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self, job: PlannedJob) -> set[int]:
        """Positions (tokens) at which the job keeps what a restore there needs."""
        boundary = (job.tokens - _REJOIN_TOKENS) // BLOCK * BLOCK
        kept = {*job.keep, job.tokens, boundary}
        if self.keep_every:
            kept.update(range(self.keep_every, job.tokens, self.keep_every))
        for custom_id in job.custom_ids:
            kept.update(self.positions.get(custom_id, ()))
        return {position for position in kept if 0 < position <= job.tokens}


#: What a plain prefill keeps.
USUAL = Keeping()


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskUse:
    """Bytes that a plan's jobs add to the store, by kind of record."""

    kv: float = 0
    window: float = 0
    state: float = 0
    logits: float = 0

    @property
    def total(self) -> float:
        return self.kv + self.window + self.state + self.logits

    def __add__(self, other: DiskUse) -> DiskUse:
        return DiskUse(
            kv=self.kv + other.kv,
            window=self.window + other.window,
            state=self.state + other.state,
            logits=self.logits + other.logits,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds at given rates.

    The prefill takes from `least_seconds` to `most_seconds` of one worker, depending on which
    jobs run side by side. Where bytes are not known, loading and what follows from it is None.
    """

    least_seconds: float
    most_seconds: float
    #: One prefill for each prompt, nothing shared.
    unshared_seconds: float
    #: Reading every prompt's cache once.
    load_seconds: float | None
    #: How often each prompt must be resumed until the prefill has paid, at the worst; infinite
    #: when reading is not faster than prefilling.
    break_even_resumes: float | None
    #: Bytes a second below which reading a cache is slower than prefilling its prompt.
    break_even_disk_rate: float | None


def disk_use(
    plan: Plan, group: Group, shape: CacheShape, codec: str, keeping: Keeping = USUAL
) -> DiskUse:
    """Bytes that the jobs of `group` add to the store with `codec`. Headers are left out."""
    codec = known_codec(codec)
    (totals,) = (one.totals for one in plan.groups if one.group == group)
    jobs = [(n, job) for n, job in enumerate(plan.jobs) if job.group == group]
    tokens = totals.new_block_tokens
    window = states = 0
    if shape.window_tokens and keeping.all_windows:
        window = tokens
    elif shape.window_tokens:
        reach = shape.window_tokens + BLOCK
        window = sum(_window_tokens(job, keeping.of(job), reach) for _, job in jobs)
    if shape.state_bytes:
        kept = _own_positions(jobs, keeping)
        states = len(kept)
        # Where a state rests within a block, the rows of the block up to there rest beside it.
        tokens += sum(position % BLOCK for _, position in kept)
        tokens -= sum(job.tokens % BLOCK for _, job in jobs if job.kind is JobKind.PROMPT)
    else:
        tokens += sum(job.tokens % BLOCK for _, job in jobs if job.kind is JobKind.PREFIX)
    return DiskUse(
        kv=tokens * shape.kv_bytes(codec),
        window=window * shape.window_bytes(codec),
        state=states * shape.state_bytes,
        logits=shape.logits_bytes * sum(job.kind is JobKind.PROMPT for _, job in jobs),
    )


def estimate(
    plan: Plan,
    shapes: dict[Group, CacheShape],
    rate: float,
    *,
    codec: str | None = None,
    disk_rate: float = DISK_RATE,
) -> Estimate:
    """Times at `rate` tokens a second of prefill and `disk_rate` bytes a second of reading.

    `shapes` are the groups' caches, and `codec` is read instead of each group's own if given.
    A group without a shape leaves what depends on bytes unknown.
    """
    totals = plan.totals
    unshared = totals.tokens / rate
    most = totals.prefill_tokens / rate
    load = resumes = least_disk_rate = None
    if totals.prompts and all(one.group in shapes for one in plan.groups):
        size = 0.0
        for group, tokens, count in _prompts(plan):
            chosen = known_codec(codec or group.codec)
            size += count * shapes[group].cache_bytes(chosen, tokens)
        load = size / disk_rate
        spared = unshared - load
        resumes = most / spared if spared > 0 else float("inf")
        least_disk_rate = size / unshared
    return Estimate(
        least_seconds=totals.new_tokens / rate,
        most_seconds=most,
        unshared_seconds=unshared,
        load_seconds=load,
        break_even_resumes=resumes,
        break_even_disk_rate=least_disk_rate,
    )


def measured_rate(manifests: Iterable[Manifest], models: Iterable[str]) -> float | None:
    """Tokens a second at which caches of `models` were prefilled; None when there are none.

    Of those that computed the most: where nearly all was reused, what a job costs beside its tokens
    would count as slow tokens.
    """
    names = {_last_part(one) for one in models}
    runs = [
        (one.tokens - one.reused_tokens, one.prefill_seconds)
        for one in manifests
        if one.prefill_seconds > 0 and _last_part(one.model) in names
    ]
    most = max((tokens for tokens, _ in runs), default=0)
    long = [run for run in runs if 2 * run[0] >= most]
    return sum(tokens for tokens, _ in long) / sum(run[1] for run in long) if most else None


def _last_part(model: str) -> str:
    """A model is often at another path on the worker."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def _prompts(plan: Plan) -> Iterator[tuple[Group, int, int]]:
    """Group, tokens and number of custom ids of every distinct prompt."""
    for job in plan.jobs:
        if job.kind is JobKind.PROMPT:
            yield job.group, job.tokens, len(job.custom_ids)
    for done in plan.done:
        yield done.group, done.tokens, len(done.custom_ids)


def _start(job: PlannedJob) -> int:
    """Where the first block that the job writes begins."""
    return (job.tokens - job.prefill_tokens) // BLOCK * BLOCK


def _own_positions(
    jobs: Iterable[tuple[int, PlannedJob]], keeping: Keeping
) -> set[tuple[int | None, int]]:
    """Kept positions beyond where jobs start, each with the job that it belongs to.

    A point where children of one parent part is one position of the parent's, not of each child.
    """
    return {
        (job.parent if position in job.keep else -1 - place, position)
        for place, job in jobs
        for position in keeping.of(job)
        if position > _start(job)
    }


def _window_tokens(job: PlannedJob, kept: set[int], reach: int) -> int:
    """Tokens of the job's own blocks within `reach` before a kept position."""
    tokens, done = 0, _start(job)
    for position in sorted(kept):
        low = max(done, max(position - reach, 0) // BLOCK * BLOCK)
        high = min(-(-position // BLOCK) * BLOCK, job.tokens)
        if high > low:
            tokens += high - low
            done = high
    return tokens
