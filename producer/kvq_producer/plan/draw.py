"""The tree of shared prefixes, drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeAlias

from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from kvq.store.keys import TokenIds, common_prefix
from kvq_producer.plan.planner import Plan
from kvq_producer.plan.values import Group, JobKind

#: Turns the first ids of a piece (uint32) into text, for one group's model.
Decode: TypeAlias = Callable[[Group, TokenIds], str]

#: Tokens of a piece that are shown as its first words, and letters of them.
_FIRST_TOKENS, _FIRST_LETTERS = 24, 48
#: Tokens of a piece that are looked at to find where it differs from those beside it.
_LOOK = 512


def draw(
    plan: Plan, decode: Decode | None = None, *, depth: int = 4, breadth: int = 5
) -> list[Tree]:
    """A tree for each group: what jobs add to their parents, and how many prompts go on from there.

    Shows at most `depth` levels and `breadth` branches at each, those that most prompts wait for
    first, and sums up the rest. Without `decode` no words are shown.
    """
    children: dict[int | None, list[int]] = defaultdict(list)
    for place, job in enumerate(plan.jobs):
        children[job.parent].append(place)
    drawing = _Drawing(plan, children, decode, depth, breadth)
    trees = []
    for one in plan.groups:
        group, totals = one.group, one.totals
        name = group.model if group.adapter is None else f"{group.model} + {group.adapter}"
        tree = Tree(
            f"[bold]{escape(name)}[/] {escape(group.codec)}: {_prompts(totals.prompts)}, "
            f"{totals.tokens:,} tokens, {totals.prefill_tokens:,} to prefill"
        )
        drawing.add(tree, [n for n in children[None] if plan.jobs[n].group == group], 1)
        if totals.already_stored:
            tree.add(f"[dim]{_prompts(totals.already_stored)} stored already[/]")
        trees.append(tree)
    return trees


class _Drawing:
    def __init__(
        self,
        plan: Plan,
        children: dict[int | None, list[int]],
        decode: Decode | None,
        depth: int,
        breadth: int,
    ) -> None:
        self.plan, self.children, self.decode = plan, children, decode
        self.depth, self.breadth = depth, breadth

    def add(self, tree: Tree, places: list[int], level: int) -> None:
        """Draw the jobs at `places`, and what is below them, under `tree`."""
        jobs = self.plan.jobs
        places = sorted(places, key=lambda n: (-jobs[n].serves, -jobs[n].critical_tokens, n))
        shown = places[: self.breadth]
        for place, words in zip(shown, self._words(shown), strict=True):
            below = self.children.get(place, [])
            branch = tree.add(_one_line(self._label(place, words)))
            if below and level < self.depth:
                self.add(branch, below, level + 1)
            elif below:
                branch.add(self._rest(below))
        if len(places) > self.breadth:
            tree.add(self._rest(places[self.breadth :]))

    def _label(self, place: int, words: str) -> str:
        job = self.plan.jobs[place]
        waiting = job.serves - len(job.custom_ids)
        what = f"+{job.prefill_tokens:,} tokens"
        if job.kind is JobKind.PREFIX:
            what = f"[bold]{what}[/] shared by {_prompts(job.serves)}"
        elif waiting:
            what = f"[bold]{what}[/] [cyan]{self._names(job.custom_ids)}[/], then {waiting:,} more"
        else:
            what = f"{what} [cyan]{self._names(job.custom_ids)}[/]"
        return f"{what} [dim]{escape(words)}[/]" if words else what

    def _names(self, custom_ids: tuple[str, ...]) -> str:
        more = f" and {len(custom_ids) - 1:,} equal" if len(custom_ids) > 1 else ""
        return escape(custom_ids[0][:_FIRST_LETTERS]) + more

    def _words(self, places: list[int]) -> list[str]:
        """What the pieces of the jobs at `places` begin with, from where each differs from all."""
        if self.decode is None:
            return [""] * len(places)
        pieces = [self._piece(place) for place in places]
        words = []
        for number, (place, piece) in enumerate(zip(places, pieces, strict=True)):
            others = pieces[:number] + pieces[number + 1 :]
            skip = max((common_prefix(piece, other) for other in others), default=0)
            skip = min(skip, len(piece) - 1)
            text = self.decode(self.plan.jobs[place].group, piece[skip : skip + _FIRST_TOKENS])
            line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
            line = f"… {line}" if skip else line
            fits = len(line) <= _FIRST_LETTERS
            words.append(line if fits else f"{line[: _FIRST_LETTERS - 1]}…")
        return words

    def _piece(self, place: int) -> TokenIds:
        """The first ids that the job adds to its parent's, at least one."""
        job = self.plan.jobs[place]
        start = min(job.tokens - job.prefill_tokens, job.tokens - 1)
        return self.plan.ids(job, start)[:_LOOK]

    def _rest(self, places: Iterable[int]) -> str:
        rest = [self.plan.jobs[place] for place in places]
        prompts, tokens = sum(job.serves for job in rest), self._tokens_below(places)
        return f"[dim]… {_prompts(prompts)} more, +{tokens:,} tokens[/]"

    def _tokens_below(self, places: Iterable[int]) -> int:
        todo, tokens = list(places), 0
        while todo:
            place = todo.pop()
            tokens += self.plan.jobs[place].prefill_tokens
            todo += self.children.get(place, [])
        return tokens


def _one_line(markup: str) -> Text:
    text = Text.from_markup(markup, overflow="ellipsis")
    text.no_wrap = True
    return text


def _prompts(count: int) -> str:
    return f"{count:,} prompt" if count == 1 else f"{count:,} prompts"
