"""From the tree of a group's prompts to its jobs.

A job may start from where another ends: a prefix job, or a prompt that others go on from. The
deepest such place on a prompt's path is its anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq.store.keys import BLOCK
from kvq_producer.plan.arrange import arrange
from kvq_producer.plan.batch import Batch
from kvq_producer.plan.branches import Branch, grow
from kvq_producer.plan.values import Group, JobKind, Stored, StoredLookup, Totals

#: Most positions that a job is told to keep. A kept position costs a window's records or a state.
MAX_KEEP = 16
#: A branch point nearer than this to a position that is kept anyway is not worth keeping.
KEEP_GAP = 64


@dataclass(slots=True, eq=False)
class Draft:
    """A job while its place in the order is not known yet."""

    kind: JobKind
    group: Group
    prompt: int
    tokens: int
    prefill_tokens: int
    parent: Draft | None
    keep: tuple[int, ...]
    priority: int = 0
    serves: int = 0
    critical_tokens: int = 0
    is_parent: bool = False
    place: int = -1


@dataclass(slots=True)
class _Anchor:
    """Where a job starts: `tokens` that will be stored once `job`, if any, is done."""

    tokens: int
    job: Draft | None = None


@dataclass(slots=True)
class _Way:
    """What the jobs below a branch find there."""

    anchor: _Anchor
    keep: tuple[int, ...]


def draft_jobs(
    batch: Batch, group: Group, lookup: StoredLookup | None, align: int = BLOCK
) -> tuple[list[Draft], list[int], Totals]:
    """The jobs of one group, parents before children; its stored prompts; its totals.

    Prefix jobs end at multiples of `align` tokens.
    """
    order, shared = arrange(batch, batch.groups[group])
    branches, leaves = grow(shared)
    stored = _ask(batch, group, order, shared, lookup)
    drafts = _Drafts(batch, group, order, stored, align)
    drafts.follow(branches, leaves)
    done = [one for one, state in zip(order, stored, strict=True) if state.complete]
    return drafts.drafts, done, _totals(batch, order, shared, stored, drafts.drafts)


def _ask(
    batch: Batch, group: Group, order: list[int], shared: list[int], lookup: StoredLookup | None
) -> list[Stored]:
    """What is stored of each prompt, asking only where the neighbour's answer leaves it open."""
    nothing = Stored()
    if lookup is None:
        return [nothing] * len(order)
    found: list[Stored] = []
    for place, prompt in enumerate(order):
        if found and found[-1].tokens < shared[place]:
            found.append(found[-1])
        else:
            found.append(lookup(group, batch.ids(prompt), batch.custom_ids(prompt)))
    return found


class _Drafts:
    def __init__(
        self, batch: Batch, group: Group, order: list[int], stored: list[Stored], align: int
    ) -> None:
        self.batch, self.group, self.order, self.stored = batch, group, order, stored
        self.align = align
        self.drafts: list[Draft] = []
        self._pending = [0]
        for state in stored:
            self._pending.append(self._pending[-1] + (not state.complete))

    def follow(self, branches: list[Branch], leaves: list[Branch]) -> None:
        """Draft every job, from the root down."""
        reached = self._stored_below(branches, leaves)
        ways: dict[Branch, _Way] = {}
        for branch in branches:
            above = ways[branch.parent] if branch.parent else _Way(_Anchor(0), ())
            ways[branch] = self._enter(branch, above, min(reached[branch], branch.tokens))
        for place, branch in enumerate(leaves):
            if self.batch.lengths[self.order[place]] > branch.tokens:
                self._prompt(place, ways[branch])
        for draft in reversed(self.drafts):
            draft.critical_tokens += draft.prefill_tokens
            if draft.parent is not None:
                up = draft.parent
                up.is_parent = True
                up.serves += draft.serves
                up.priority = max(up.priority, draft.priority)
                up.critical_tokens = max(up.critical_tokens, draft.critical_tokens)

    def _stored_below(self, branches: list[Branch], leaves: list[Branch]) -> dict[Branch, int]:
        """For each branch, the most that is stored of any prompt that passes it."""
        reached = dict.fromkeys(branches, 0)
        for state, branch in zip(self.stored, leaves, strict=True):
            reached[branch] = max(reached[branch], state.tokens)
        for branch in reversed(branches):
            if branch.parent:
                reached[branch.parent] = max(reached[branch.parent], reached[branch])
        return reached

    def _enter(self, branch: Branch, above: _Way, stored: int) -> _Way:
        """The way on from `branch`, `stored` tokens of which are in the store."""
        anchor = above.anchor if stored < above.anchor.tokens else _Anchor(stored)
        first = self.order[branch.low]
        aligned = branch.tokens // self.align * self.align
        if self.batch.lengths[first] == branch.tokens:
            # A prompt that others go on from is itself the prefix that they wait for.
            job = self._prompt(branch.low, _Way(anchor, above.keep))
            if anchor.tokens < branch.tokens:
                anchor = _Anchor(branch.tokens, job)
        elif self._is_worth_a_job(aligned - anchor.tokens, branch):
            keep = tuple(one for one in above.keep if one < aligned)
            job = self._draft(JobKind.PREFIX, first, aligned, _Way(anchor, keep))
            anchor = _Anchor(aligned, job)
        return _Way(anchor, _with_branch_point(above.keep, branch.tokens, anchor.tokens))

    def _is_worth_a_job(self, tokens: int, branch: Branch) -> bool:
        """Whether to prefill `tokens` up to `branch` once instead of once for each prompt below.

        Always when they are a block. Less than that is worth a job of its own only where many
        share it, and never a few tokens, such as the one with which every text begins: the whole
        batch would wait for that job.
        """
        count = self._pending[branch.high] - self._pending[branch.low]
        return count > 1 and tokens >= KEEP_GAP and tokens * count >= BLOCK

    def _prompt(self, place: int, way: _Way) -> Draft | None:
        """Draft the job of the prompt at `place`, unless the store has it whole."""
        prompt, state = self.order[place], self.stored[place]
        if state.complete:
            return None
        if state.tokens and state.tokens >= way.anchor.tokens:
            way = _Way(_Anchor(state.tokens), way.keep)
        draft = self._draft(JobKind.PROMPT, prompt, self.batch.lengths[prompt], way)
        draft.serves = self.batch.count(prompt)
        draft.priority = self.batch.priorities[prompt]
        return draft

    def _draft(self, kind: JobKind, prompt: int, tokens: int, way: _Way) -> Draft:
        draft = Draft(
            kind=kind,
            group=self.group,
            prompt=prompt,
            tokens=tokens,
            prefill_tokens=tokens - way.anchor.tokens,
            parent=way.anchor.job,
            keep=way.keep,
        )
        self.drafts.append(draft)
        return draft


def _with_branch_point(keep: tuple[int, ...], point: int, anchor: int) -> tuple[int, ...]:
    """`keep` and `point`, if it is worth keeping beside the `anchor`, which is kept anyway.

    Of too many, the one is dropped without which the least is to be prefilled again.
    """
    before = max(anchor, keep[-1] if keep else 0)
    if point - before < KEEP_GAP:
        return keep
    keep = (*keep, point)
    if len(keep) <= MAX_KEEP:
        return keep
    gaps = [here - there for there, here in zip((0, *keep), keep, strict=False)]
    least = gaps.index(min(gaps))
    return keep[:least] + keep[least + 1 :]


def _totals(
    batch: Batch, order: list[int], shared: list[int], stored: list[Stored], drafts: list[Draft]
) -> Totals:
    prompts = tokens = unique = new = blocks = new_blocks = already = 0
    for prompt, common, state in zip(order, shared, stored, strict=True):
        length, count = batch.lengths[prompt], batch.count(prompt)
        prompts += count
        tokens += count * length
        unique += length - common
        new += length - max(common, state.tokens)
        shared_blocks = common // BLOCK * BLOCK
        blocks += length - shared_blocks
        on_disk = length if state.tokens == length else state.tokens // BLOCK * BLOCK
        new_blocks += length - max(shared_blocks, on_disk)
        already += count if state.complete else 0
    prefixes = sum(draft.kind is JobKind.PREFIX for draft in drafts)
    return Totals(
        prompts=prompts,
        tokens=tokens,
        unique_tokens=unique,
        new_tokens=new,
        prefill_tokens=sum(draft.prefill_tokens for draft in drafts),
        block_tokens=blocks,
        new_block_tokens=new_blocks,
        prompt_jobs=len(drafts) - prefixes,
        prefix_jobs=prefixes,
        duplicates=prompts - len(order),
        already_stored=already,
    )
