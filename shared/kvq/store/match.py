"""A match: the longest stored prefix of some token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import CannotTrim
from kvq.store.keys import TokenIds
from kvq.store.layout import SUFFIX, BlockName, parse_stem
from kvq.store.reason import Reason, explain
from kvq.store.restorable import Restorable, RestorePlan
from kvq.store.space import Space
from kvq.store.walk import walk

if TYPE_CHECKING:
    from kvq.cache.container import KVCacheContainer
    from kvq.store.store import Store


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
