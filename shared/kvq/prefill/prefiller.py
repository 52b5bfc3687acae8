"""The prefill of one prompt: match, restore, compute the rest in chunks, publish, manifest last."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvq import codec as codecs
from kvq.cache.leaves import check_supported, describe
from kvq.cache.recorder import Recorder
from kvq.errors import PromptTooLong, StoreUnavailable
from kvq.model.loading import LoadedModel
from kvq.prefill.compute import OnChunk, compute
from kvq.prefill.request import PrefillOutcome, PrefillRequest
from kvq.prefill.schedule import kept_positions
from kvq.store.manifest import Manifest
from kvq.store.match import Match, match_in_space
from kvq.store.space import Leaf, Space
from kvq.store.store import Store
from kvq.store.writer import Writer


def _ignore(done: int, total: int) -> None:
    pass


class Prefiller:
    """Prefills prompts with one model into one store. Use it on one thread, the model's.

    `step` is the number of tokens in a chunk.
    """

    def __init__(self, store: Store, llm: LoadedModel, *, step: int = 512) -> None:
        self.store = store
        self.llm = llm
        self.step = step
        self._leaves: tuple[Leaf, ...] | None = None

    def space(self, codec: str) -> Space:
        """The space that this model's caches have with `codec`. Raises UnsupportedModel."""
        chosen = codecs.get(codec)
        if self._leaves is None:
            self._leaves = _probe(self.llm)
        return Space(
            fingerprint=self.llm.fingerprint,
            dtype=_kv_dtype(self._leaves),
            codec=chosen.name,
            codec_parameters=chosen.parameters,
            leaves=self._leaves,
        )

    def run(self, request: PrefillRequest, *, on_chunk: OnChunk = _ignore) -> PrefillOutcome:
        """Store the prompt of `request`, or what is missing of it.

        `on_chunk(done, total)`, in tokens, is called at the start and after each chunk. What it
        raises ends the prefill: finished blocks are published first, and another run goes on from
        there. Raises PromptTooLong, UnsupportedModel, StoreUnavailable.
        """
        began = time.monotonic()
        self._check_length(len(request.token_ids))
        space = self.space(request.codec)
        match = self._match(space, request)
        if _is_stored(match, request):
            outcome = self._outcome(request, match, reused=match.tokens)
        else:
            outcome = self._prefill(request, space, match, on_chunk)
        if request.name is not None:
            self._publish(request, self._match(space, request), outcome)
        return outcome.took(time.monotonic() - began)

    def _prefill(
        self, request: PrefillRequest, space: Space, match: Match, on_chunk: OnChunk
    ) -> PrefillOutcome:
        kept = kept_positions(len(request.token_ids), request.keep, request.keep_every)
        writer = Writer(self.store)
        recorder = Recorder(
            space=space,
            folder=self.store.space_folder(space),
            ids=request.token_ids,
            kept=kept,
            writer=writer,
            all_windows=request.window_records == "all",
        )
        try:
            try:
                computed = compute(
                    self.llm.model,
                    match,
                    recorder,
                    step=self.step,
                    stops=kept if space.needs.state else (),
                    keep_logits=request.name is not None,
                    on_chunk=on_chunk,
                )
            finally:
                writer.finish()
        finally:
            writer.close()
        recorder.remove_checkpoints()
        stored = self._match(space, request)
        if not _is_stored(stored, request):
            raise StoreUnavailable(
                f"{self.store.path}: what was just written cannot be found again "
                f"({stored.reason.message}); check the disk or the share"
            )
        return self._outcome(
            request,
            stored,
            reused=computed.reused,
            bytes_written=writer.bytes_written,
            seconds=computed.seconds,
        )

    def _outcome(
        self,
        request: PrefillRequest,
        match: Match,
        *,
        reused: int,
        bytes_written: int = 0,
        seconds: float = 0.0,
    ) -> PrefillOutcome:
        assert match.space is not None
        exact = codecs.get(match.space.codec).exact
        return PrefillOutcome(
            name=request.name,
            space=match.space.digest,
            codec=match.space.codec,
            tokens=match.tokens,
            reused_tokens=reused,
            prefilled_tokens=match.tokens - reused,
            bytes=match.nbytes,
            bytes_written=bytes_written,
            lossy_prefix_tokens=0 if exact else reused,
            quality=None,
            notes=match.notes(),
            prefill_seconds=seconds,
            seconds=0.0,
        )

    def _match(self, space: Space, request: PrefillRequest) -> Match:
        return match_in_space(self.store, space, self.store.add_space(space), request.token_ids)

    def _publish(self, request: PrefillRequest, match: Match, outcome: PrefillOutcome) -> None:
        assert match.space is not None
        assert request.name is not None
        now = time.time()
        manifest = Manifest(
            name=request.name,
            space=outcome.space,
            fingerprint=match.space.fingerprint,
            model=self.llm.name,
            codec=outcome.codec,
            dtype=match.space.dtype,
            tokens=outcome.tokens,
            chain=match.stems(),
            kept=kept_positions(outcome.tokens, request.keep, request.keep_every),
            nbytes=outcome.bytes,
            created=now,
            expires=None if request.ttl is None else now + request.ttl,
            pinned=request.pin,
            prefill_seconds=outcome.prefill_seconds,
            reused_tokens=outcome.reused_tokens,
            lossy_prefix_tokens=outcome.lossy_prefix_tokens,
            quality=outcome.quality,
            notes=outcome.notes,
            worker=request.worker,
            metadata=request.metadata,
        )
        self.store.write_manifest(manifest)

    def _check_length(self, tokens: int) -> None:
        limit = self.llm.facts.context_tokens
        if tokens == 0:
            raise PromptTooLong("the prompt has no tokens")
        if limit is not None and tokens > limit:
            raise PromptTooLong(
                f"the prompt has {tokens} tokens, the model's context is {limit}: shorten it"
            )


def _probe(llm: LoadedModel) -> tuple[Leaf, ...]:
    """What the model's layers keep, found by feeding one token. Raises UnsupportedModel."""
    caches = make_prompt_cache(llm.model)
    check_supported(caches)
    llm.model(mx.zeros((1, 1), mx.uint32), cache=caches)
    mx.eval([cache.state for cache in caches])
    return describe(caches)


def _is_stored(match: Match, request: PrefillRequest) -> bool:
    """A shared prefix needs its rows; a cache the logits after its last token too."""
    whole = match.tokens == len(request.token_ids)
    return whole and (request.name is None or match.exact)


def _kv_dtype(leaves: Sequence[Leaf]) -> str:
    return next((leaf.keys_dtype for leaf in leaves if leaf.keys_dtype), "none")
