"""Prompts to token ids: many at a time, each checked against what its model can take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from kvq.errors import MissingExtra, ModelError, UnknownToken, UsageError
from kvq.model.chat import (
    Chat,
    ChatPrefix,
    dated_kwargs,
    encode_chat_prefixes,
    encode_texts,
    load_tokenizer,
)
from kvq.model.folder import read_facts, resolve
from kvq.store.keys import TokenIds
from kvq.store.parallel import ordered
from kvq_producer.prompts import Faults, Prompt

Input = TypeVar("Input")
Output = TypeVar("Output")

# Enough texts at once to keep all cores busy, few enough to hold.
_BATCH_PROMPTS = 512
_BATCH_CHARACTERS = 8 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedPrompt:
    """A prompt with its model and token ids (uint32, at least one).

    The ids of a chat end at its stable boundary; `keep` are positions (tokens) before the end
    where a cache of it must also be restorable. `chat_template_kwargs` are those that give the
    same ids on any later day: the caller's, and `date` if the template writes one.
    """

    prompt: Prompt
    model: str
    ids: TokenIds
    keep: tuple[int, ...] = ()
    chat_template_kwargs: dict[str, Any] | None = None


def tokenize(
    prompts: Iterable[Prompt],
    default_model: str | None,
    *,
    faults: Faults,
    now: datetime | None = None,
) -> Iterator[TokenizedPrompt]:
    """The prompts in order with their token ids; one that cannot be used is added to `faults`.

    A prompt that names no model is for `default_model`. Each model's tokenizer is loaded once.
    Templates that write the date get `now`, by default the moment of the call. Works on a thread
    of its own, at most some 1,500 prompts ahead of the caller. Raises ModelNotFound and its like
    for `default_model`, MissingExtra without transformers; what is wrong with another model is a
    fault of the lines that name it.
    """
    moment = now or datetime.now()
    models = _Models(default_model)

    def run(batch: list[Prompt]) -> dict[int, TokenizedPrompt | str]:
        results: dict[int, TokenizedPrompt | str] = {}
        for name, group in _by_model(batch, default_model):
            lines = [prompt.line for prompt in group]
            results |= zip(lines, models.run(name, group, moment), strict=True)
        return results

    # Tokenizers leave Python's lock free: meanwhile the next lines are read and the last planned.
    for batch, results in ordered(run, _batches(prompts), threads=1, name="kvq-tokenize"):
        for prompt in batch:
            result = results[prompt.line]
            if isinstance(result, str):
                faults.add(prompt.line, [result])
            else:
                yield result


class _Models:
    """The models of one batch, or why they cannot be used."""

    def __init__(self, default: str | None) -> None:
        self._default = default
        self._known: dict[str, _Model | ModelError] = {}

    def run(
        self, name: str | None, prompts: Sequence[Prompt], now: datetime
    ) -> list[TokenizedPrompt | str]:
        """Each of the model's prompts with its ids, or the reason why it cannot be used."""
        if name is None:
            reason = 'no model: name one in the line as "model", or for all with --model'
            return [reason for _ in prompts]
        try:
            model = self._known.get(name) or _Model(name)
            if isinstance(model, _Model):
                self._known[name] = model
                return list(model.run(prompts, now))
        except ModelError as error:
            if name == self._default:
                raise
            self._known[name] = model = error
        return [str(model) for _ in prompts]


class _Model:
    """A model as far as its prompts are concerned."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = resolve(name, weights=False)
        self._facts = read_facts(self._folder)

    @cached_property
    def _tokenizer(self) -> Any:
        # Prompts given as token ids need none.
        return load_tokenizer(self._folder)

    def run(self, prompts: Sequence[Prompt], now: datetime) -> Iterator[TokenizedPrompt | str]:
        """Each prompt with its ids, or the reason why it cannot be used."""
        texts = iter(self._texts([p.text for p in prompts if p.text is not None]))
        chats = iter(self._chats([p for p in prompts if p.messages is not None], now))
        for prompt in prompts:
            keep: tuple[int, ...] = ()
            kwargs = None
            if prompt.token_ids is not None:
                ids: TokenIds | UsageError = np.array(prompt.token_ids, dtype=np.uint32)
            elif prompt.text is not None:
                ids = next(texts)
            else:
                chat, kwargs = next(chats)
                if isinstance(chat, ChatPrefix):
                    ids = chat.ids
                    keep = (chat.stable,) if 0 < chat.stable < len(ids) else ()
                else:
                    ids = chat
            if isinstance(ids, UsageError):
                yield str(ids)
            elif (reason := self._unusable(ids)) is not None:
                yield reason
            else:
                yield TokenizedPrompt(
                    prompt=prompt, model=self.name, ids=ids, keep=keep, chat_template_kwargs=kwargs
                )

    def _texts(self, texts: Sequence[str]) -> list[TokenIds | UsageError]:
        return _all_or_each(lambda some: encode_texts(self._tokenizer, some), texts)

    def _chats(
        self, prompts: Sequence[Prompt], now: datetime
    ) -> list[tuple[ChatPrefix | UsageError, dict[str, Any] | None]]:
        if not prompts:
            return []
        kwargs = [
            dated_kwargs(self._tokenizer, prompt.chat_template_kwargs, prompt.tools, now)
            for prompt in prompts
        ]
        chats = [
            Chat(messages=prompt.messages or [], tools=prompt.tools, chat_template_kwargs=some)
            for prompt, some in zip(prompts, kwargs, strict=True)
        ]
        found = _all_or_each(
            lambda some: encode_chat_prefixes(self._tokenizer, some, now=now), chats
        )
        return list(zip(found, kwargs, strict=True))

    def _unusable(self, ids: TokenIds) -> str | None:
        if not len(ids):
            return "the prompt gives no tokens"
        context = self._facts.context_tokens
        if context is not None and len(ids) > context:
            return f"the prompt has {len(ids)} tokens, the model's context is {context}"
        try:
            self._facts.check_vocabulary(ids)
        except UnknownToken as error:
            return str(error)
        return None


def _batches(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    batch: list[Prompt] = []
    characters = 0
    for prompt in prompts:
        batch.append(prompt)
        characters += len(prompt.text or "") + 8 * len(prompt.token_ids or ())
        characters += sum(len(message["content"]) for message in prompt.messages or ())
        if len(batch) >= _BATCH_PROMPTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _by_model(
    prompts: Sequence[Prompt], default_model: str | None
) -> Iterator[tuple[str | None, list[Prompt]]]:
    named = sorted(
        ((prompt.model or default_model, prompt) for prompt in prompts),
        key=lambda pair: pair[0] or "",
    )
    for model, group in groupby(named, key=lambda pair: pair[0]):
        yield model, [prompt for _, prompt in group]


def _all_or_each(
    encode: Callable[[Sequence[Input]], Sequence[Output | UsageError]], inputs: Sequence[Input]
) -> list[Output | UsageError]:
    if not inputs:
        return []
    try:
        return list(encode(inputs))
    except MissingExtra:
        raise
    except UsageError as error:
        # A batch fails as a whole: find out which of it are to blame.
        if len(inputs) == 1:
            return [error]
        half = len(inputs) // 2
        return [*_all_or_each(encode, inputs[:half]), *_all_or_each(encode, inputs[half:])]
