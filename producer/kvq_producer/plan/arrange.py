"""Lays prompts side by side so that those which share a prefix are neighbours."""

from __future__ import annotations

from kvq.store.keys import BLOCK
from kvq_producer.plan.batch import Batch
from kvq_producer.plan.spool import WIDTH

#: Tokens compared at a time. Blocks that all share are passed over by their keys.
_STRIDE = 32


def arrange(batch: Batch, prompts: list[int]) -> tuple[list[int], list[int]]:
    """`prompts` in the order of their token ids, and what neighbours share.

    The second list gives for each place the tokens shared with the place before it, 0 for the
    first; any two prompts share the least of the numbers between them. A prompt that is a prefix
    of others comes right before them.
    """
    order = list(prompts)
    shared = [0] * len(order)
    todo = [(0, len(order), 0)]  # stretches of `order` that share that many tokens
    while todo:
        low, high, at = todo.pop()
        at = _past_shared_blocks(batch, order[low:high], at)
        heads = sorted((batch.head(one, at, _STRIDE), one) for one in order[low:high])
        order[low:high] = [one for _, one in heads]
        run = low
        for place in range(low + 1, high):
            before, here = heads[place - 1 - low][0], heads[place - low][0]
            if before != here:
                shared[place] = at + _common_tokens(before, here)
                if place - run > 1:
                    todo.append((run, place, at + _STRIDE))
                run = place
        if high - run > 1:
            todo.append((run, high, at + _STRIDE))
    return order, shared


def _past_shared_blocks(batch: Batch, prompts: list[int], at: int) -> int:
    """The end of the last full block that all `prompts` share, or `at` when that is further."""
    low, high = at // BLOCK, min(batch.lengths[one] for one in prompts) // BLOCK
    if low < high and not _all_share(batch, prompts, low):
        return at
    while low < high:
        middle = (low + high) // 2
        if _all_share(batch, prompts, middle):
            low = middle + 1
        else:
            high = middle
    return max(at, low * BLOCK)


def _all_share(batch: Batch, prompts: list[int], depth: int) -> bool:
    key = batch.block_key(prompts[0], depth)
    return all(batch.block_key(one, depth) == key for one in prompts)


def _common_tokens(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size]) ^ int.from_bytes(b[:size])
    return (size - (differing.bit_length() + 7) // 8) // WIDTH
