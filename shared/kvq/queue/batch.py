"""A batch: what one submit created, remembered in Redis for a lifetime."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvq.errors import BatchNotFound
from kvq.queue import entries, keys, scripts
from kvq.queue.enqueue import RETRIES, run_script
from kvq.queue.entries import Entry
from kvq.queue.outcome import ALREADY_STORED, read_outcome
from kvq.queue.results import PromptResult, State

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """What is known of a batch without looking at its jobs. Times are seconds since 1970 UTC."""

    id: str
    created: float
    expires: float
    queue: str
    source: str
    models: tuple[str, ...]
    store: str | None
    prompts: int
    jobs: int
    tokens: int
    #: Tokens that its jobs were planned to prefill.
    work: int


class Batch:
    """A batch in Redis. Every method may raise redis errors; see `connection.queue_errors`."""

    def __init__(self, connection: Any, facts: BatchFacts) -> None:
        self._connection = connection
        self.facts = facts

    @classmethod
    def create(
        cls,
        connection: Any,
        facts: BatchFacts,
        prompts: Sequence[Entry],
        prefixes: Sequence[Entry],
    ) -> Batch:
        """Remember a batch, before its jobs are enqueued. `facts.id` is from `new_id`."""
        lifetime = max(1, int(facts.expires - facts.created))
        data = json.dumps(asdict(facts), separators=(",", ":"))
        with connection.pipeline(transaction=False) as pipe:
            entries.write(pipe, facts.id, prompts, kind="prompts", lifetime=lifetime)
            entries.write(pipe, facts.id, prefixes, kind="prefixes", lifetime=lifetime)
            pipe.hset(keys.batch(facts.id), mapping={"facts": data, "submitted": 0})
            pipe.expire(keys.batch(facts.id), lifetime)
            pipe.zadd(keys.BATCHES, {facts.id: facts.expires})
            pipe.execute()
        return cls(connection, facts)

    @classmethod
    def find(cls, connection: Any, batch_id: str | None = None) -> Batch:
        """The batch of that id, or the newest. Raises BatchNotFound."""
        if batch_id is None:
            newest = max(cls.all(connection), key=lambda one: one.facts.created, default=None)
            if newest is None:
                raise BatchNotFound("no batch is known here; `kvq submit` makes one")
            return newest
        data = connection.hget(keys.batch(batch_id), "facts")
        if data is None:
            raise BatchNotFound(
                f"no batch {batch_id!r}: the id is wrong, or its lifetime has ended; "
                "`kvq status` lists those that are known"
            )
        return cls(connection, _facts(data))

    @classmethod
    def all(cls, connection: Any) -> list[Batch]:
        """Every batch whose lifetime has not ended, the one that ends first first."""
        connection.zremrangebyscore(keys.BATCHES, 0, time.time())
        ids = connection.zrange(keys.BATCHES, 0, -1)
        with connection.pipeline(transaction=False) as pipe:
            for one in ids:
                pipe.hget(keys.batch(one.decode()), "facts")
            found = pipe.execute()
        return [cls(connection, _facts(data)) for data in found if data]

    def mark_submitted(self) -> None:
        """Note that every job of the batch is in the queue; one that is missing is lost then."""
        self._connection.hset(keys.batch(self.facts.id), "submitted", 1)

    def state_of_missing_jobs(self) -> State:
        """What it means that Redis does not know one of the batch's jobs."""
        key = keys.batch(self.facts.id)
        facts, canceled, submitted = self._connection.hmget(key, "facts", "canceled", "submitted")
        if canceled:
            return State.CANCELED
        return State.PENDING if facts and submitted != b"1" else State.LOST

    def prompts(self) -> Iterator[list[Entry]]:
        """Its prompts in the order of the file, in pieces."""
        return entries.read(self._connection, self.facts.id, kind="prompts")

    def prefixes(self) -> Iterator[list[Entry]]:
        """Its prefixes, in pieces."""
        return entries.read(self._connection, self.facts.id, kind="prefixes")

    def results(self) -> Iterator[PromptResult]:
        """What became of each prompt, in the order of the file: exactly one result a prompt.

        Raises BatchNotFound when Redis has forgotten the batch, or a part of it.
        """
        missing = self.state_of_missing_jobs()
        left = self.facts.prompts
        fetch = run_script(self._connection, scripts.RESULTS)
        for piece in self.prompts():
            ids = list(dict.fromkeys(one.job_id for one in piece if one.job_id))
            replies = fetch(args=[keys.JOB_PREFIX, keys.RESULTS_PREFIX, *ids]) if ids else []
            outcomes = dict(zip(ids, map(read_outcome, replies), strict=True))
            left -= len(piece)
            for one in piece:
                outcome = outcomes[one.job_id] if one.job_id else ALREADY_STORED
                yield PromptResult(
                    custom_id=one.custom_id or "",
                    state=missing if outcome.state is State.LOST else outcome.state,
                    name=one.name,
                    job_id=one.job_id,
                    facts=one.facts or outcome.facts,
                    code=outcome.code,
                    message=outcome.message,
                )

        if left:
            raise BatchNotFound(
                f"Redis has forgotten {left} of the {self.facts.prompts} prompts of batch "
                f"{self.facts.id}, perhaps in a restart: submit them again"
            )

    def cancel(self) -> Counter[str]:
        """Drop the jobs that no other batch wants; those that run stop at their next chunk.

        Returns how many jobs were `dropped`, are `stopping`, are `shared` with another batch,
        or were `over`.
        """
        self._connection.hset(keys.batch(self.facts.id), "canceled", int(time.time()))
        registries = [
            self._registry(kind) for kind in ("deferred", "finished", "failed", "canceled")
        ]
        words = self._each_job(scripts.CANCEL, registries, [keys.JOB_PREFIX, self.facts.id])
        if words["dropped"]:
            sweep = run_script(self._connection, scripts.SWEEP)
            sweep(keys=[keys.queue(self.facts.queue)], args=[keys.JOB_PREFIX])
        return words

    def retry(self) -> Counter[str]:
        """Run its failed jobs again, and those that were stopped while they ran.

        Returns how many jobs run `again`, are `pending` anyway, `stored`, or `lost`.
        """
        lifetime = max(1, int(self.facts.expires - time.time()))
        registries = [self._registry(kind) for kind in ("finished", "failed", "canceled")]
        head = [keys.JOB_PREFIX, keys.RESULTS_PREFIX, self.facts.id, lifetime, RETRIES]
        words = self._each_job(scripts.RETRY, [keys.queue(self.facts.queue), *registries], head)
        if words["again"] or words["pending"]:
            self._connection.hdel(keys.batch(self.facts.id), "canceled")
        return words

    def _registry(self, kind: str) -> str:
        return keys.registry(kind, self.facts.queue)

    def _each_job(self, script: str, names: list[str], head: list[Any]) -> Counter[str]:
        run, words, seen = run_script(self._connection, script), Counter[str](), set[str]()
        for pieces in (self.prefixes(), self.prompts()):
            for piece in pieces:
                ids = [one.job_id for one in piece if one.job_id and one.job_id not in seen]
                ids = list(dict.fromkeys(ids))
                seen.update(ids)
                if ids:
                    words.update(word.decode() for word in run(keys=names, args=[*head, *ids]))
        return words


def new_id() -> str:
    """A new id for a batch: ten letters and digits that are hard to misread."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


def _facts(data: bytes) -> BatchFacts:
    source = json.loads(data)
    known = {one.name: source[one.name] for one in fields(BatchFacts)}
    return BatchFacts(**{**known, "models": tuple(known["models"])})
