"""A match: the longest stored prefix of some token ids, and why it ends where it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import CannotTrim, DamagedFile
from kvq.store.keys import TokenIds
from kvq.store.layout import SUFFIX, BlockName, parse_stem
from kvq.store.restorable import Restorable, RestorePlan
from kvq.store.space import Space
from kvq.store.walk import Walk, walk

if TYPE_CHECKING:
    from kvq.cache.container import KVCacheContainer
    from kvq.store.store import Store


class End(StrEnum):
    """Why a match ends where it does."""

    COMPLETE = "complete"  #: every token asked for is stored
    DIVERGED = "diverged"  #: what is stored goes on with another token
    STORED_ENDS = "stored_ends"  #: what is stored ends here
    STATE_TOO_SHALLOW = "state_too_shallow"  #: more is stored, but no recurrent state that deep
    WINDOW_NOT_KEPT = "window_not_kept"  #: more is stored, but not its sliding-window records
    DAMAGED = "damaged"  #: a file's digest or header did not hold
    NO_SPACE = "no_space"  #: nothing is stored for this model with any of the codecs asked for
    OTHER_MODEL = "other_model"  #: the store only has caches of other models


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a match ended: `end` for programs, `message` for people.

    `position` is the token count up to which prompt and store agree; `stored` and `asked` are the
    first differing token ids where that is the reason.
    """

    end: End
    message: str
    position: int = 0
    stored: int | None = None
    asked: int | None = None


@dataclass(frozen=True, kw_only=True)
class Match:
    """The longest restorable stored prefix of `ids` in one space.

    `tokens` is its length (0: nothing). Nothing has been read from the tensors yet, so `load` can
    still find a damaged block; it then restores less and says so in the container's `reason`.
    """

    ids: TokenIds
    tokens: int
    space: Space | None
    reason: Reason
    #: Codec and tokens of the best match in every space of the model, the chosen one first.
    spaces: tuple[tuple[str, int], ...] = ()
    plan: RestorePlan = field(repr=False, default=RestorePlan(tokens=0))
    store: Store | None = field(repr=False, default=None)
    restorable: Restorable | None = field(repr=False, default=None)

    @property
    def exact(self) -> bool:
        """Whether all of the prompt is stored with the logits after its last token."""
        return self.tokens == len(self.ids) > 0 and self.plan.logits is not None

    @property
    def resume_tokens(self) -> int:
        """Where generation goes on: at the match, or before it where nothing would be left to feed.

        After an exact match the first token comes from the stored logits; without those at least
        the last token has to be fed again.
        """
        if self.exact or self.tokens < len(self.ids):
            return self.tokens
        return self.plan_upto(max(0, len(self.ids) - 1)).tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the files that a restore of the match reads."""
        return sum(header.file_bytes for header in self.plan.files())

    def blocks(self) -> tuple[BlockName, ...]:
        """Every block of the match, from token 0 on."""
        headers = (part.header for part in self.plan.kv)
        return tuple(
            parse_stem(one.meta.parent, one.path.name.removesuffix(SUFFIX)) for one in headers
        )

    def stems(self) -> tuple[str, ...]:
        """`<key>.<n>.<first>` of every block of the match, from token 0 on."""
        return tuple(block.stem for block in self.blocks())

    def notes(self) -> tuple[str, ...]:
        """What the codec did to some layers that is not the plain case, once each."""
        groups = (g for part in self.plan.kv for g in part.header.meta.groups)
        return tuple(
            sorted(
                {g[side]["coding"].get("note", "") for g in groups for side in ("k", "v")} - {""}
            )
        )

    def load(self, model: Any, upto: int | None = None, **options: Any) -> KVCacheContainer:
        """The model's caches, restored to `upto` tokens (default: all that matched).

        Reads the blocks, checks their digests, and evaluates every array before it returns. The
        options are those of `kvq.cache.restore.restore`. A damaged block is quarantined; the
        container then covers fewer tokens (`.tokens`) and its `.reason` says why.

        Raises CannotTrim when `upto` is not a position that can be restored; `.nearest` is one.
        """
        from kvq.cache.restore import restore  # MLX only where tensors are read

        return restore(self, model, upto=upto, **options)

    def plan_at(self, upto: int | None) -> RestorePlan:
        """The files for exactly `upto` tokens. Raises CannotTrim with the nearest position."""
        if upto is None or upto == self.tokens:
            return self.plan
        if not 0 <= upto <= self.tokens:
            raise CannotTrim(
                f"cannot load {upto} tokens: the match has {self.tokens}", nearest=self.tokens
            )
        plan = self.plan_upto(upto)
        if plan.tokens != upto:
            raise CannotTrim(
                f"cannot restore this model at {upto} tokens: the nearest position before it "
                f"where every layer was kept is {plan.tokens}",
                nearest=plan.tokens,
            )
        return plan

    def plan_upto(self, limit: int) -> RestorePlan:
        """The files for the deepest position at or before `limit` that can be restored."""
        if limit >= self.tokens:
            return self.plan
        return self.restorable.deepest(limit) if self.restorable else RestorePlan(tokens=0)


def ended_by_damage(damage: DamagedFile, tokens: int, position: int | None = None) -> Reason:
    """The reason when `damage` lets a match end at `tokens`."""
    return Reason(
        end=End.DAMAGED,
        message=f"a damaged file ends the match at {tokens} tokens: {damage}",
        position=tokens if position is None else position,
    )


def match_in_space(
    store: Store,
    space: Space,
    folder: Path,
    ids: TokenIds,
    avoid: Mapping[Path, str] | None = None,
) -> Match:
    """The match of `ids` in one space. Damaged files on the way are quarantined.

    `avoid` are files, each with the reason, that count as damaged too.
    """
    walked = walk(folder, ids, avoid)
    restorable = Restorable(walked, space.needs)
    plan = restorable.deepest()
    for damage in (*walked.damaged, *restorable.damaged):
        store.quarantine(damage)
    return Match(
        ids=ids,
        tokens=plan.tokens,
        space=space,
        reason=explain(walked, restorable, plan),
        plan=plan,
        store=store,
        restorable=restorable,
    )


def explain(walked: Walk, restorable: Restorable, plan: RestorePlan) -> Reason:
    """Why the plan does not reach further."""
    ids, extent, damage = walked.ids, walked.extent, (*walked.damaged, *restorable.damaged)
    if plan.tokens == len(ids):
        message = f"all {len(ids)} tokens are stored"
        return Reason(end=End.COMPLETE, message=message, position=extent)
    if damage:
        return ended_by_damage(damage[0], plan.tokens, extent)
    if plan.tokens < extent and restorable.needs.state:
        return Reason(
            end=End.STATE_TOO_SHALLOW,
            message=f"{extent} tokens are stored, but the deepest recurrent state that was kept "
            f"is at {plan.tokens}",
            position=extent,
        )
    if plan.tokens < extent:
        return Reason(
            end=End.WINDOW_NOT_KEPT,
            message=f"{extent} tokens are stored, but the sliding-window records of the "
            f"{restorable.needs.window} before that position were not kept",
            position=extent,
        )
    return _why_walk_ended(walked)


def _why_walk_ended(walked: Walk) -> Reason:
    ids, extent = walked.ids, walked.extent
    for step in walked.tails:
        if not step.whole and step.end == extent < len(ids):
            stored = int(step.header.meta.token_ids[step.common])
            asked = int(ids[step.end])
            return Reason(
                end=End.DIVERGED,
                message=f"token {step.end} differs: stored {stored}, asked for {asked}",
                position=extent,
                stored=stored,
                asked=asked,
            )
    if walked.children.count and not walked.tails and extent < len(ids):
        return Reason(
            end=End.DIVERGED,
            message=f"nothing stored goes on with token {int(ids[extent])} at position {extent}",
            position=extent,
            asked=int(ids[extent]),
        )
    return Reason(
        end=End.STORED_ENDS,
        message=f"what is stored ends after {extent} of the {len(ids)} tokens",
        position=extent,
    )
