"""The prefill of one prompt: match, restore, compute the rest in chunks, publish, manifest last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from kvq import codec as codecs
from kvq.cache.container import KVCacheContainer
from kvq.cache.recorder import Recorder
from kvq.codec.quality import Quality
from kvq.errors import PromptTooLong, StoreUnavailable
from kvq.model.loading import LoadedModel
from kvq.prefill.compute import OnChunk, Task, compute
from kvq.prefill.gate import Gate, accepted, candidates, is_gated, limit_of
from kvq.prefill.memory import PrefixMemory
from kvq.prefill.publish import publish
from kvq.prefill.record import Records
from kvq.prefill.request import PrefillOutcome, PrefillRequest
from kvq.prefill.schedule import kept_positions
from kvq.prefill.spaces import ModelSpaces
from kvq.prefill.verdict import judge, passes
from kvq.store.disk import store_errors
from kvq.store.hold import hold, touch
from kvq.store.match import Match, match_in_space
from kvq.store.restorable import RestorePlan
from kvq.store.space import Space
from kvq.store.store import Store
from kvq.store.writer import Writer

#: How often a prompt is looked for or prefilled again because a sweep took a part of it.
_TRIES = 3

#: Bytes of prefixes that are kept in memory for the prompts that share them.
PREFIX_MEMORY = 2 << 30


def _ignore(done: int, total: int) -> None:
    pass


class Prefiller:
    """Prefills prompts with one model into one store. Use it on one thread, the model's.

    `step` is the number of tokens in a chunk, `prefix_memory` how many bytes of just computed
    prefixes are kept exact in memory.
    """

    def __init__(
        self,
        store: Store,
        llm: LoadedModel,
        *,
        step: int = 512,
        prefix_memory: int = PREFIX_MEMORY,
    ) -> None:
        self.store = store
        self.llm = llm
        self.step = step
        self.spaces = ModelSpaces(llm)
        self._records = Records(store)
        self._memory = PrefixMemory(llm.model, prefix_memory)
        #: What `auto` chose last: where the next prompt starts.
        self._auto = "q8"

    def run(self, request: PrefillRequest, *, on_chunk: OnChunk = _ignore) -> PrefillOutcome:
        """Store the prompt of `request`, or what is missing of it.

        `on_chunk(done, total)`, in tokens, is called at the start and after each chunk. What it
        raises ends the prefill: finished blocks are published first, and another run goes on from
        there. Raises PromptTooLong, UnknownToken, UnsupportedModel, StoreUnavailable.

        Where the measured loss of the codec is above `max_kl`, the prompt is prefilled once more
        with a better one.
        """
        began = time.monotonic()
        self._check_length(len(request.token_ids))
        self.llm.facts.check_vocabulary(request.token_ids)
        for _ in range(_TRIES):
            looked: dict[str, Match] = {}
            outcome, match = self._find(request, looked) or self._make(request, looked, on_chunk)
            outcome = replace(outcome, seconds=time.monotonic() - began)
            if self._publish(request, match, outcome):
                return outcome
        raise StoreUnavailable(
            f"{self.store.path}: what was just written cannot be found again "
            f"({match.reason.message}); check the disk or the share, and whether a sweep runs with "
            "too short a grace period"
        )

    def _publish(self, request: PrefillRequest, match: Match, outcome: PrefillOutcome) -> bool:
        """Hold what was found or written, and say so in a manifest; False when some of it is gone.

        A sweep may have taken old blocks that no manifest names since the match.
        """
        if not _is_stored(match, request):
            return False
        with store_errors(self.store.path):
            plans = [match.plan, *(match.plan_upto(at) for at in _restored_alone(match, request))]
            if not all([_touch(plan) for plan in plans]):
                return False
            if request.name is None:
                return hold(self.store.space_folder(self.spaces.of(outcome.codec)), match.blocks())
        return publish(self.store, self.llm, request, match, outcome)

    def _find(
        self, request: PrefillRequest, looked: dict[str, Match]
    ) -> tuple[PrefillOutcome, Match] | None:
        """What is stored already, in a codec that the request accepts; None when it is not.

        `looked` gets the match in each codec that was looked for, in vain or not.
        """
        for codec in accepted(request.codec, request.max_kl, default=self._auto):
            match = looked[codec] = self._match(codec, request)
            if not _is_stored(match, request):
                continue
            if request.name is None:
                return _outcome(request, match, reused=match.tokens), match
            known = self._records.of(match, request.name)
            if passes(codec, known.quality if known else None, request.codec, request.max_kl):
                outcome = _outcome(request, match, reused=match.tokens)
                if known is not None:
                    outcome = replace(outcome, quality=known.quality, notes=known.notes)
                return outcome, match
        return None

    def _make(
        self, request: PrefillRequest, looked: Mapping[str, Match], on_chunk: OnChunk
    ) -> tuple[PrefillOutcome, Match]:
        """Prefill, measure, and prefill once more where the gate wants another codec."""
        codec = self._auto if request.codec == "auto" else request.codec
        match = looked.get(codec) or self._match(codec, request)
        names = candidates(request.codec, request.max_kl) if request.name is not None else ()
        outcome, match, measured = self._attempt(request, match, names, on_chunk)
        verdict = judge(measured, codec, request)
        if verdict.codec != codec:
            better = self._match(verdict.codec, request)
            again, match, _ = self._attempt(request, better, (), on_chunk)
            outcome = replace(
                again,
                bytes_written=outcome.bytes_written + again.bytes_written,
                prefill_seconds=outcome.prefill_seconds + again.prefill_seconds,
            )
        if request.codec == "auto" and request.name is not None:
            self._auto = verdict.codec
        notes = (*outcome.notes, *verdict.notes)
        return replace(outcome, quality=verdict.quality, notes=notes), match

    def _attempt(
        self, request: PrefillRequest, match: Match, names: Sequence[str], on_chunk: OnChunk
    ) -> tuple[PrefillOutcome, Match, Mapping[str, Quality]]:
        """Store what `match` lacks of the prompt, in its codec.

        What that did, what is stored then, and the quality of those of the codecs `names` that
        were measured.
        """
        assert match.space is not None
        codec = match.space.codec
        caches, lossy_prefix = self._start(match, request)
        start = caches.tokens
        gate = Gate(
            self.llm.model,
            request.token_ids,
            names,
            match.space.leaves,
            begin=start,
            limit=limit_of(request.codec, request.max_kl),
        )
        writer = Writer(self.store)
        try:
            try:
                seconds = self._compute(request, match, caches, writer, gate, on_chunk)
            finally:
                writer.finish()
        finally:
            writer.close()
        # The device is at the gate's replay while what was written is looked up.
        stored = self._match(codec, request)
        gate.replay(caches)
        if request.name is None and _is_stored(stored, request):
            self._memory.put(request.token_ids, caches, lossy_prefix)
        outcome = _outcome(
            request,
            stored,
            reused=start,
            lossy_prefix=lossy_prefix,
            bytes_written=writer.bytes_written,
            seconds=seconds,
        )
        return outcome, stored, gate.measured

    def _compute(
        self,
        request: PrefillRequest,
        match: Match,
        caches: KVCacheContainer,
        writer: Writer,
        gate: Gate,
        on_chunk: OnChunk,
    ) -> float:
        assert match.space is not None
        kept = kept_positions(len(request.token_ids), request.keep, request.keep_every)
        recorder = Recorder(
            space=match.space,
            folder=self.store.space_folder(match.space),
            ids=request.token_ids,
            kept=kept,
            writer=writer,
            all_windows=request.window_records == "all",
        )
        task = Task(
            model=self.llm.model,
            ids=request.token_ids,
            step=self.step,
            stops=kept if match.space.needs.state else (),
            keep_logits=request.name is not None,
        )
        seconds = compute(task, caches, recorder, gate, on_chunk)
        writer.finish()
        recorder.remove_checkpoints()
        return seconds

    def _start(self, match: Match, request: PrefillRequest) -> tuple[KVCacheContainer, int]:
        """Caches to go on from, and how many of their tokens went through a lossy codec.

        Where this process computed that very prefix itself, they come from memory, exact.
        """
        assert match.space is not None
        tokens = match.resume_tokens
        lost = _first_lost(match, request)
        if lost is not None:
            tokens = match.plan_upto(lost).tokens
        if is_gated(request.codec, request.max_kl) and match.exact:
            tokens = 0  # what is left to feed would measure nothing
        # What is not written again is in use from now on: a sweep leaves it.
        with store_errors(self.store.path):
            _touch(match.plan_upto(tokens))
        remembered = self._memory.take(match.ids[:tokens])
        if remembered is not None:
            return remembered
        caches = match.load(self.llm.model, upto=tokens)
        if tokens:  # what a restore leaves behind fits no chunk
            mx.clear_cache()
        return caches, 0 if codecs.get(match.space.codec).exact else caches.tokens

    def _match(self, codec: str, request: PrefillRequest) -> Match:
        space: Space = self.spaces.of(codec)
        return match_in_space(self.store, space, self.store.add_space(space), request.token_ids)

    def _check_length(self, tokens: int) -> None:
        limit = self.llm.facts.context_tokens
        if tokens == 0:
            raise PromptTooLong("the prompt has no tokens")
        if limit is not None and tokens > limit:
            raise PromptTooLong(
                f"the prompt has {tokens} tokens, the model's context is {limit}: shorten it"
            )


def _is_stored(match: Match, request: PrefillRequest) -> bool:
    """A shared prefix needs its rows; a cache the logits after its last token too.

    And each kept position has to be one: another prompt may have stored the same tokens without.
    """
    whole = match.tokens == len(request.token_ids)
    return whole and (request.name is None or match.exact) and _first_lost(match, request) is None


def _first_lost(match: Match, request: PrefillRequest) -> int | None:
    """The first kept position within the match that cannot be restored there."""
    kept = _restored_alone(match, request)
    return next((at for at in kept if match.plan_upto(at).tokens != at), None)


def _restored_alone(match: Match, request: PrefillRequest) -> list[int]:
    """The kept positions within the match that need files of their own: windows or states."""
    assert match.space is not None
    if not (match.space.needs.window or match.space.needs.state):
        return []
    kept = kept_positions(len(request.token_ids), request.keep, request.keep_every)
    return [at for at in kept if at <= match.tokens]


def _touch(plan: RestorePlan) -> bool:
    """Mark all files of `plan` as in use now; False when one is gone. Raises OSError."""
    return all([touch(header.path) for header in plan.files()])


def _outcome(
    request: PrefillRequest,
    match: Match,
    *,
    reused: int,
    lossy_prefix: int = 0,
    bytes_written: int = 0,
    seconds: float = 0.0,
) -> PrefillOutcome:
    assert match.space is not None
    return PrefillOutcome(
        name=request.name,
        space=match.space.digest,
        codec=match.space.codec,
        tokens=match.tokens,
        reused_tokens=reused,
        prefilled_tokens=match.tokens - reused,
        bytes=match.nbytes,
        bytes_written=bytes_written,
        lossy_prefix_tokens=lossy_prefix,
        quality=None,
        notes=match.notes(),
        prefill_seconds=seconds,
        seconds=0.0,
    )
