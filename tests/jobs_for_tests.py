"""Jobs and batches of made-up token ids."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

from kvq.queue.batch import Batch, BatchFacts, new_id
from kvq.queue.connection import PatientRedis
from kvq.queue.enqueue import Enqueuer, JobToEnqueue
from kvq.queue.entries import Entry
from kvq.queue.messages import CacheToWrite, PrefillMessage

LIFETIME = 3600.0


def packed(seed: int, tokens: int) -> bytes:
    return array("I", [seed * 100_000 + position for position in range(tokens)]).tobytes()


def job(seed: int, tokens: int = 256, *, model: str = "fast", **options: Any) -> JobToEnqueue:
    """A job that writes the cache `cache-<seed>`; without `name=True`, a shared prefix."""
    name = options.pop("name", f"cache-{seed}")
    own = {key: options.pop(key) for key in ("parents", "front", "trust") if key in options}
    message = PrefillMessage(
        model=model,
        tail=packed(seed, tokens),
        caches=(CacheToWrite(name=name),) if name else (),
        custom_ids=(f"prompt-{seed}",),
        **options,
    )
    return JobToEnqueue(id=message.job_id(message.tail), message=message, **own)


def submit(
    client: PatientRedis,
    prompts: Sequence[JobToEnqueue],
    prefixes: Sequence[JobToEnqueue] = (),
    *,
    timeout: float = 600,
) -> Batch:
    """A batch of these jobs, enqueued."""
    facts = BatchFacts(
        id=new_id(),
        created=time.time(),
        expires=time.time() + LIFETIME,
        queue="kvq",
        source="test",
        models=("fast",),
        store=None,
        prompts=len(prompts),
        jobs=len(prompts) + len(prefixes),
        tokens=0,
        work=0,
    )

    def entry(one: JobToEnqueue, custom_id: str | None) -> Entry:
        tokens = one.message.tokens
        name = one.message.caches[0].name if one.message.caches else None
        return Entry(custom_id=custom_id, job_id=one.id, name=name, tokens=tokens, work=tokens)

    batch = Batch.create(
        client,
        facts,
        [entry(one, one.message.custom_ids[0]) for one in prompts],
        [entry(one, None) for one in prefixes],
    )
    enqueuer = Enqueuer(client, "kvq", batch=facts.id, timeout=timeout, lifetime=LIFETIME)
    enqueuer.enqueue([*prefixes, *prompts])
    batch.mark_submitted()
    return batch
