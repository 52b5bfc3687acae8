"""`plan`: planning large batches, rate and memory.

Each batch is planned in a process of its own, so that its peak memory is its own. The time that
it takes to make the prompts up is measured first and not counted. Rates are by processor time,
of one core; `seconds` is what passed, which other work on the machine makes longer.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvq.store.keys import TokenIds
from kvq.units import format_bytes
from kvq_producer.plan import Group, TokenizedPrompt, make_plan

_RANDOM = np.random.default_rng(0)
_WORDS = _RANDOM.integers(0, 150_000, 1 << 20, dtype=np.uint32)


def text(number: int, tokens: int) -> TokenIds:
    """Ids that differ from those of every other number in their first two."""
    start = number * 7919 % (len(_WORDS) - tokens)
    return np.concatenate([divmod(number, 65_536), _WORDS[start : start + tokens - 2]]).astype(
        np.uint32
    )


def distinct(count: int) -> Iterator[TokenIds]:
    """Nothing in common, 256 tokens each."""
    for number in range(count):
        yield text(number, 256)


def one_prefix(count: int) -> Iterator[TokenIds]:
    """2,000 tokens in common, then 256 of their own."""
    shared = text(0, 2000)
    for number in range(count):
        yield np.concatenate([shared, text(number + 1, 256)])


def documents(count: int) -> Iterator[TokenIds]:
    """2,000 tokens in common, then one of 200 documents of 3,000, then a question of 100."""
    documents = [np.concatenate([text(0, 2000), text(n + 1, 3000)]) for n in range(200)]
    for number in range(count):
        yield np.concatenate([documents[number % 200], text(number + 1000, 100)])


def chats(count: int) -> Iterator[TokenIds]:
    """Chats that grow by 200 tokens a turn, each of their 10 turns a prompt."""
    for number in range(count):
        chat = text(number // 10, 2000)
        yield chat[: 200 * (number % 10 + 1)]


BATCHES: dict[str, Callable[[int], Iterator[TokenIds]]] = {
    "distinct": distinct,
    "one-prefix": one_prefix,
    "documents": documents,
    "chats": chats,
}


def measure(name: str, count: int) -> dict[str, Any]:
    """Plan one batch; rates in seconds, memory in bytes."""
    group = Group(model="model")
    began = clocks()
    for _ in BATCHES[name](count):
        pass
    making = clocks() - began
    before = peak_memory()
    began = clocks()
    prompts = (
        TokenizedPrompt(custom_id=f"request-{number}", group=group, ids=ids)
        for number, ids in enumerate(BATCHES[name](count))
    )
    with make_plan(prompts) as plan:
        seconds, busy = clocks() - began - making
        totals = plan.totals
        return {
            "batch": name,
            "prompts": totals.prompts,
            "tokens": totals.tokens,
            "jobs": totals.jobs,
            "saving": totals.saving,
            "best_saving": totals.best_saving,
            "seconds": seconds,
            "processor_seconds": busy,
            "prompts_per_second": totals.prompts / busy,
            "tokens_per_second": totals.tokens / busy,
            "memory": peak_memory() - before,
            "spooled": plan.spool.tokens * 4,
        }


def clocks() -> np.ndarray:
    """Seconds that passed and seconds that this process was busy."""
    return np.array([time.perf_counter(), time.process_time()])


def peak_memory() -> int:
    """Bytes of the largest resident size so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run(prompts: int) -> None:
    """Print a row for each batch."""
    found = []
    context = multiprocessing.get_context("spawn")
    for name in BATCHES:
        with context.Pool(1) as pool:
            found.append(pool.apply(measure, (name, prompts)))
    print("batch         prompts        tokens     jobs          saving  seconds     busy"
          "  prompts/s     tokens/s   memory  on disk")  # fmt: skip
    for one in found:
        saving = f"{one['saving']:.1%}-{one['best_saving']:.1%}"
        print(
            f"{one['batch']:12}{one['prompts']:9,}{one['tokens']:14,}{one['jobs']:9,}"
            f"{saving:>16}{one['seconds']:9.2f}{one['processor_seconds']:9.2f}"
            f"{one['prompts_per_second']:11,.0f}"
            f"{one['tokens_per_second']:13,.0f}{format_bytes(one['memory']):>9}"
            f"{format_bytes(one['spooled']):>9}"
        )
