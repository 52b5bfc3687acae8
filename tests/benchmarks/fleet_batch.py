"""The prompts of `fleet`, and how fast any fleet could prefill them."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Sequence
from pathlib import Path

from kvq_producer.plan import PlannedJob

#: Tokens that all families begin with, those of a family after them, those of a prompt of its own.
ROOT, FAMILY, OWN = 256, 512, (128, 384)
#: Prompts of a family; of all prompts, every so many shares nothing.
FAMILY_SIZE, ALONE = 45, 10
_VOCABULARY = 256


def write_prompts(path: Path, prompts: int, seed: int) -> None:
    """A prompts file of token ids in three levels: one root, families, and some prompts alone."""
    draw = random.Random(seed)

    def ids(tokens: int) -> list[int]:
        return [draw.randrange(_VOCABULARY) for _ in range(tokens)]

    root, families = ids(ROOT), {}
    with path.open("w") as lines:
        for number in range(prompts):
            if number % ALONE == 0:
                prefix = ids(FAMILY // 2)
            else:
                family = number // ALONE % max(1, prompts * (ALONE - 1) // ALONE // FAMILY_SIZE)
                prefix = root + families.setdefault(family, ids(FAMILY))
            line = {"custom_id": f"p{number}", "token_ids": prefix + ids(draw.randint(*OWN))}
            lines.write(json.dumps(line) + "\n")


def shortest(jobs: Sequence[PlannedJob], workers: int, rate: float, cost: float) -> float:
    """Seconds that `workers` need at least, about: each is given the job with most work below it.

    A job takes its tokens at `rate` a second and `cost` seconds. A list schedule by critical path:
    at most twice the shortest there is, and for a batch of many short jobs within one of them.
    """
    children: dict[int, list[int]] = {}
    below = [0.0] * len(jobs)
    took = [job.prefill_tokens / rate + cost for job in jobs]
    for place in reversed(range(len(jobs))):
        below[place] += took[place]
        parent = jobs[place].parent
        if parent is not None:
            children.setdefault(parent, []).append(place)
            below[parent] = max(below[parent], below[place])
    ready = [(-below[place], place) for place, job in enumerate(jobs) if job.parent is None]
    heapq.heapify(ready)
    running: list[tuple[float, int]] = []
    now = 0.0
    while ready or running:
        while ready and len(running) < workers:
            _, place = heapq.heappop(ready)
            heapq.heappush(running, (now + took[place], place))
        now, place = heapq.heappop(running)
        for child in children.get(place, ()):
            heapq.heappush(ready, (-below[child], child))
    return now


def longest_chain(jobs: Sequence[PlannedJob], rate: float) -> float:
    """Seconds of the longest chain of jobs that wait for each other."""
    return max(job.critical_tokens for job in jobs if job.parent is None) / rate
