"""The one prompt of a command line, in whichever form it was given, as token ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from kvq.errors import MissingExtra, ModelError, UsageError
from kvq.store.keys import TokenIds, as_ids


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A text, a file with one, chat messages, standard input, or token ids: exactly one."""

    prompt: str | None = None
    prompt_file: IO[bytes] | None = None
    messages: IO[bytes] | None = None
    from_stdin: bool = False
    token_ids: IO[bytes] | None = None
    chat_template_kwargs: str | None = None

    def check(self) -> None:
        """Raise UsageError unless exactly one form was given."""
        forms = (self.prompt, self.prompt_file, self.messages, self.token_ids)
        if sum(form is not None for form in forms) + self.from_stdin != 1:
            raise UsageError(
                "give exactly one of --prompt, --prompt-file, --messages, --stdin and --token-ids"
            )
        if self.chat_template_kwargs is not None and self.messages is None:
            raise UsageError("--chat-template-kwargs goes with --messages")

    def ids(self, folder: Path) -> TokenIds:
        """Token ids as an app's generation asks for them, by the tokenizer in `folder`.

        Raises UsageError for what is not a prompt, and what loading a tokenizer raises.
        """
        form = self.form()
        if self.token_ids is not None:
            ids: TokenIds = form["prompt"]
            return ids
        from kvq.model.chat import encode_messages, encode_text

        tokenizer = _tokenizer(folder)
        if self.messages is not None:
            return encode_messages(tokenizer, **form)
        return encode_text(tokenizer, form["prompt"])

    def form(self) -> dict[str, Any]:
        """The prompt as `LLM.stream` takes it. Raises UsageError for what is none."""
        if self.token_ids is not None:
            return {"prompt": ids_of_json(self.token_ids.read())}
        if self.messages is None:
            return {"prompt": self._text()}
        chat = _chat(_json(self.messages.read(), "--messages"))
        if self.chat_template_kwargs is not None:
            kwargs = _json(self.chat_template_kwargs, "--chat-template-kwargs")
            chat["chat_template_kwargs"] = kwargs
        return chat

    def _text(self) -> str:
        if self.prompt is not None:
            return self.prompt
        data = self.prompt_file.read() if self.prompt_file else sys.stdin.buffer.read()
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            source = "--prompt-file" if self.prompt_file else "standard input"
            raise UsageError(f"{source} is not UTF-8 (byte {error.start})") from error


def ids_of_json(data: bytes) -> TokenIds:
    """The ids in a JSON list, or in the list `token_ids` of an object. Raises UsageError."""
    try:
        found = json.loads(data)
        return as_ids(found["token_ids"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(f"--token-ids is not a JSON list of token ids: {error}") from error


def decoder(folder: Path) -> Callable[[Sequence[int]], str] | None:
    """Turns ids into text by the tokenizer in `folder`; None where there is none."""
    try:
        tokenizer = _tokenizer(folder)
    except (MissingExtra, ModelError):
        return None
    return lambda ids: str(tokenizer.decode(list(ids)))


def _chat(found: Any) -> dict[str, Any]:
    """What a chat template is given, of a list of messages or an object as in a prompts file."""
    if not isinstance(found, dict):
        return {"messages": found}
    if "messages" not in found:
        raise UsageError('--messages is an object without "messages"')
    names = ("messages", "tools", "chat_template_kwargs")
    return {name: found[name] for name in names if found.get(name) is not None}


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Any:
    from kvq.model.chat import load_tokenizer

    return load_tokenizer(folder)


def _json(text: str | bytes, option: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is not JSON: {error}") from error
