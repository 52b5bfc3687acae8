"""Reads a prompts file, tokenizes it, and plans the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvq.store.store import Store
from kvq_producer.plan import Group, Plan, TokenizedPrompt, make_plan
from kvq_producer.prompts import Faults, Prompt, PromptFile, open_prompts
from kvq_producer.submit.garbage import seldom_collected
from kvq_producer.submit.lookup import Lookup
from kvq_producer.submit.wish import Wanted, Wish
from kvq_producer.tokenize import tokenize


@dataclass(frozen=True, kw_only=True)
class Intake:
    """A batch before it is submitted: its plan, and what each custom id wants.

    `wanted` is in the order of the file. `lookup` is None where no store could be asked. `faults`
    are those of lines that were left out. Close the plan when done.
    """

    source: str
    plan: Plan
    wanted: Mapping[str, Wanted]
    lookup: Lookup | None
    warnings: tuple[str, ...] = ()
    faults: Faults


@seldom_collected()
def take_in(
    path: str,
    wish: Wish,
    *,
    store: Path | None = None,
    skip_invalid: bool = False,
) -> Intake:
    """The batch in the prompts file at `path`; what `store` has already needs no job.

    Raises InvalidPrompts with every fault of the file (unless `skip_invalid`), UsageError when
    there is no prompt in it or it cannot be read, ModelError, StoreError.
    """
    with open_prompts(path) as file:
        wanted: dict[str, Wanted] = {}
        lookup = Lookup(Store(store), wanted, export=wish.export) if store is not None else None
        # A prefix job ends where the prompts part, not at a block's end before it: else each of
        # several workers would compute the tokens between the two once more.
        plan = make_plan(_prompts(file, wish, wanted), stored=lookup, align=1)
        try:
            if not skip_invalid:
                file.check()
            elif not wanted:
                file.faults.check()
                file.check()
        except BaseException:
            plan.close()
            raise
        return Intake(
            source=file.source,
            plan=plan,
            wanted=wanted,
            lookup=lookup,
            warnings=tuple(file.warnings),
            faults=file.faults,
        )


def _prompts(file: PromptFile, wish: Wish, wanted: dict[str, Wanted]) -> Iterator[TokenizedPrompt]:
    prompts: Iterable[Prompt] = file
    # What a group is takes a look at the disk.
    groups: dict[tuple[str, str | None], Group] = {}
    for one in tokenize(prompts, wish.model, faults=file.faults):
        prompt = one.prompt
        wanted[prompt.custom_id] = Wanted.of(prompt, one.keep, wish)
        which = one.model, prompt.codec
        if which not in groups:
            groups[which] = wish.group(one.model, prompt)
        yield TokenizedPrompt(
            custom_id=prompt.custom_id,
            group=groups[which],
            ids=one.ids,
            priority=prompt.priority,
        )
