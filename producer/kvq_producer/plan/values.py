"""What a plan says: frozen values, tokens counted throughout."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Protocol

from kvq.store.keys import TokenIds


class JobKind(StrEnum):
    """What a job leaves behind."""

    PREFIX = "prefix"  #: blocks only, for the jobs that wait for it
    PROMPT = "prompt"  #: a cache that answers its custom ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What prompts must agree on before one can reuse the other's blocks.

    `options` is whatever else the submitter must keep apart (any hashable value).
    """

    model: str
    adapter: str | None = None
    codec: str = "q8"
    options: Hashable = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedPrompt:
    """One prompt of a batch. `ids` is 1-D uint32; of two jobs the greater `priority` goes first."""

    custom_id: str
    group: Group
    ids: TokenIds
    priority: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What the store has of a prompt: its leading `tokens`.

    `complete` says that nothing is left to do for it, not even a manifest.
    """

    tokens: int = 0
    complete: bool = False


class StoredLookup(Protocol):
    """Asks the store about one prompt: its group, its ids (uint32), the custom ids it answers.

    The planner relies on one property of a store that matches prefixes: if n tokens of a prompt
    match, exactly n match of every other prompt that shares more than n tokens with it.
    """

    def __call__(self, group: Group, ids: TokenIds, custom_ids: tuple[str, ...]) -> Stored: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """One prefill of the leading `tokens` of a prompt, ids of which `Plan.ids` reads.

    `key` (20 bytes) is the chain key of those tokens, a shorter last block included.
    `parent` is the place in `Plan.jobs` of the job whose blocks this one starts from, None when
    it starts from token 0 or from blocks already stored; a parent comes before its children.
    `keep` are positions before `tokens`, ascending, at which other prompts part from this one.
    """

    kind: JobKind
    key: bytes
    group: Group
    tokens: int
    #: Tokens left to prefill once the parent is done.
    prefill_tokens: int
    parent: int | None
    keep: tuple[int, ...]
    #: Custom ids that this job's cache answers; none for a prefix.
    custom_ids: tuple[str, ...]
    #: How many custom ids wait for this job: its own and those of every job below it.
    serves: int
    #: Tokens to prefill from here to the end of the longest chain of jobs below.
    critical_tokens: int
    priority: int
    #: Where the ids begin in the plan's spool, counted in tokens.
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyStored:
    """A prompt that needs no job: the store has it whole."""

    key: bytes
    group: Group
    tokens: int
    custom_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Counts over the prompts of a plan, or of one group of it."""

    #: Prompts given, duplicates and stored ones included.
    prompts: int = 0
    #: Their tokens: what one run a prompt would prefill.
    tokens: int = 0
    #: Tokens of the trie of all prompts: the fewest that they can be prefilled with.
    unique_tokens: int = 0
    #: Those of them that are not stored: the fewest that the jobs can prefill. They get by with
    #: this many where siblings run one after the other, as a job also starts within a block.
    new_tokens: int = 0
    #: The most that the jobs prefill, whichever run side by side: at most `block_tokens`.
    prefill_tokens: int = 0
    #: Tokens of all distinct blocks: what is on disk when the jobs are done.
    block_tokens: int = 0
    #: Those of them that the store does not have yet.
    new_block_tokens: int = 0
    prompt_jobs: int = 0
    prefix_jobs: int = 0
    #: Prompts equal in ids to one before them.
    duplicates: int = 0
    #: Prompts, duplicates included, that need no job.
    already_stored: int = 0

    @property
    def jobs(self) -> int:
        return self.prompt_jobs + self.prefix_jobs

    @property
    def saving(self) -> float:
        """Fraction of the prompts' tokens that is spared in any case, 0 to 1."""
        return 1 - self.prefill_tokens / self.tokens if self.tokens else 0.0

    @property
    def best_saving(self) -> float:
        """Fraction of the prompts' tokens that is spared at best, 0 to 1."""
        return 1 - self.new_tokens / self.tokens if self.tokens else 0.0

    def __add__(self, other: Totals) -> Totals:
        names = (one.name for one in fields(self))
        return Totals(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTotals:
    """The totals of one group."""

    group: Group
    totals: Totals
