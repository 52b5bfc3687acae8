"""A model together with a store: text comes at once where its prompt has been read before."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kvq.cache.restore  # noqa: F401  here, so that the first prompt does not wait for it
from kvq.cache.container import KVCacheContainer
from kvq.errors import UsageError
from kvq.generate.iterator import TokenIterator
from kvq.generate.parameters import GenerateParameters
from kvq.model.chat import encode_messages, encode_text
from kvq.model.loading import LoadedModel, load
from kvq.store.keys import TokenIds, as_ids
from kvq.store.match import Match
from kvq.store.reason import Reason
from kvq.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of generated text.

    `text` is empty while a character is still incomplete. `token` is None for the text that only
    the end of the stream set free.
    """

    text: str
    token: int | None


@dataclass(frozen=True, kw_only=True)
class StreamStats:
    """How a stream went. `reason` says why no more of the prompt was reused.

    `ttft_seconds` runs from the call to the first token: matching, loading and prefill of the
    rest. `finish_reason` is `stop` (an end-of-text token), `length`, or None while it runs.
    """

    prompt_tokens: int
    reused_tokens: int
    codec: str | None
    reason: Reason | None
    load_seconds: float
    ttft_seconds: float = 0.0
    tokens: int = 0
    tokens_per_second: float = 0.0
    finish_reason: str | None = None


class LLM:
    """A loaded model and the store that its prompts are looked up in (None: none).

    `last` describes the latest stream, from its first token on. Use it on the thread that made it.
    """

    def __init__(self, loaded: LoadedModel, store: Store | None = None) -> None:
        self.loaded = loaded
        self.store = store
        self.last: StreamStats | None = None

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    @property
    def fingerprint(self) -> str:
        return self.loaded.fingerprint

    def encode(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        """Token ids of a text, of a chat rendered for an answer, or of ids as they are."""
        if (prompt is None) == (messages is None):
            raise UsageError("give either a prompt or messages")
        if messages is not None:
            return encode_messages(
                self.tokenizer, messages, tools=tools, chat_template_kwargs=chat_template_kwargs
            )
        assert prompt is not None
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        try:
            return as_ids(prompt)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def match(
        self, ids: Sequence[int] | TokenIds, *, codecs: Sequence[str] | None = None
    ) -> Match | None:
        """The longest stored prefix of `ids`; None when there is no store."""
        if self.store is None:
            return None
        return self.store.match(self.fingerprint, ids, codecs=codecs)

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        codecs: Sequence[str] | None = None,
        reuse: bool = True,
        live: bool = False,
        parameters: GenerateParameters | None = None,
        **settings: Any,
    ) -> Iterator[Chunk]:
        """Generate text after a prompt (a text or token ids) or a chat, reusing what is stored.

        `settings` are those of GenerateParameters (`max_tokens=200`, `temperature=0.7`, ...), in
        place of `parameters`. `codecs` limits the spaces looked at (`["raw"]`: exact results
        only); `reuse=False` computes everything; `live` keeps layers quantized as they rest, where
        the model can attend to them so. Raises UsageError, UnknownToken, StoreError, TemplateError.
        """
        began = time.perf_counter()
        given = parameters or GenerateParameters(**settings)
        ids = self.encode(
            prompt, messages=messages, tools=tools, chat_template_kwargs=chat_template_kwargs
        )
        if not len(ids):
            raise UsageError("the prompt is empty: give at least one token")
        self.loaded.facts.check_vocabulary(ids)
        match = self.match(ids, codecs=codecs) if reuse else None
        cache = self._load(match, live)
        reused = cache.tokens
        stats = StreamStats(
            prompt_tokens=len(ids),
            reused_tokens=reused,
            codec=match.space.codec if match is not None and match.space and reused else None,
            reason=cache.reason,
            load_seconds=time.perf_counter() - began,
        )
        iterator = TokenIterator(ids[reused:], self.model, cache, given, prior_ids=ids[:reused])
        return self._chunks(iterator, stats, began)

    def _load(self, match: Match | None, live: bool) -> KVCacheContainer:
        if match is None:
            return KVCacheContainer.make(self.model)
        return match.load(self.model, upto=match.resume_tokens, live=live)

    def _chunks(self, iterator: TokenIterator, stats: StreamStats, began: float) -> Iterator[Chunk]:
        detokenizer = self.tokenizer.detokenizer
        detokenizer.reset()
        ends = set(self.tokenizer.eos_token_ids)
        finish, first = "length", 0.0
        for token in iterator:
            now = time.perf_counter()
            if iterator.token_count == 1:
                first = now
                stats = replace(stats, ttft_seconds=now - began)
            else:
                rate = (iterator.token_count - 1) / (now - first)
                stats = replace(stats, tokens_per_second=rate)
            self.last = stats = replace(stats, tokens=iterator.token_count)
            if token in ends:
                finish = "stop"
                break
            detokenizer.add_token(token)
            yield Chunk(text=detokenizer.last_segment, token=token)
        detokenizer.finalize()
        self.last = replace(stats, finish_reason=finish)
        if detokenizer.last_segment:
            yield Chunk(text=detokenizer.last_segment, token=None)


def open_model(
    model: str, store: str | os.PathLike[str] | Store | None = None, adapter: str | None = None
) -> LLM:
    """Load `model` (a folder or a hub id) and open the store that its prompts are looked up in.

    This is `kvq.open`. Raises ModelNotFound, UnsupportedModel, StoreNotFound.
    """
    opened = Store(store) if isinstance(store, str | os.PathLike) else store
    return LLM(load(model, adapter), opened)
