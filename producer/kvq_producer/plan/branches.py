"""The tree of the places where prompts part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Branch:
    """A prefix of `tokens` tokens at which the prompts at places `low`..`high` - 1 part.

    They all share it, and no more than it; the root has 0 tokens and all prompts.
    """

    tokens: int
    low: int
    high: int
    parent: Branch | None


def grow(shared: list[int]) -> tuple[list[Branch], list[Branch]]:
    """The tree of arranged prompts, from what each shares with the one before it.

    Returns all branches, parents before their children, and for each place its deepest branch.
    """
    root = Branch(0, 0, len(shared), None)
    branches, leaves, stack = [root], [root] * len(shared), [root]
    for place in range(len(shared)):
        after = shared[place + 1] if place + 1 < len(shared) else 0
        if after > stack[-1].tokens:
            stack.append(Branch(after, place, 0, stack[-1]))
            branches.append(stack[-1])
        leaves[place] = stack[-1]
        while stack[-1].tokens > after:
            done = stack.pop()
            done.high = place + 1
            if stack[-1].tokens < after:
                # What neighbours share from here on was hidden below `done` so far.
                stack.append(Branch(after, done.low, 0, stack[-1]))
                branches.append(stack[-1])
            done.parent = stack[-1]
    branches.sort(key=lambda one: (one.low, one.tokens))
    return branches, leaves
