"""Why a match ends where it does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvq.errors import DamagedFile
from kvq.store.restorable import Restorable, RestorePlan
from kvq.store.walk import Walk


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


def ended_by_damage(damage: DamagedFile, tokens: int, position: int | None = None) -> Reason:
    """The reason when `damage` lets a match end at `tokens`."""
    return Reason(
        end=End.DAMAGED,
        message=f"a damaged file ends the match at {tokens} tokens: {damage}",
        position=tokens if position is None else position,
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
