"""Where chunks end and which positions are kept: arithmetic on token counts."""

from __future__ import annotations

from collections.abc import Sequence

from kvq.store.keys import BLOCK

#: A suffix joined to a text often changes its last tokens; a state is kept before those too.
REJOIN_TOKENS = 8


def kept_positions(
    tokens: int, keep: Sequence[int] = (), keep_every: int | None = None
) -> tuple[int, ...]:
    """Positions at which every layer is to be restorable, ascending; the last is `tokens`.

    Besides those asked for: the end, and the last block boundary at least 8 tokens before it.
    """
    kept = {position for position in keep if 0 < position < tokens} | {tokens}
    kept.add((tokens - REJOIN_TOKENS) // BLOCK * BLOCK)
    if keep_every:
        kept.update(range(keep_every, tokens, keep_every))
    return tuple(sorted(position for position in kept if position > 0))


def chunk_ends(
    start: int, tokens: int, *, step: int, stops: Sequence[int] = (), last_alone: bool = True
) -> list[int]:
    """Positions (tokens) at which the chunks from `start` on end; the last is `tokens`.

    Chunks end at multiples of `step` counted from token 0, so that two runs that start at
    different blocks chunk alike, and at each of `stops`. With `last_alone` the last token is a
    chunk of its own, as in mlx-lm's generate_step, so its logits are the same.
    """
    ends = {position for position in stops if start < position < tokens}
    ends.update(range(start - start % step + step, tokens, step))
    if last_alone and tokens - 1 > start:
        ends.add(tokens - 1)
    return [*sorted(ends), tokens]
