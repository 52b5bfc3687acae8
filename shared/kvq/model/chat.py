"""Chats to token ids, by one path for those who store prompts and those who resume from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvq.errors import MissingExtra, UsageError
from kvq.model.boundary import ChatPrefix, Renderings, chat_prefixes, follow_ups
from kvq.model.messages import Message, check_messages, check_tools
from kvq.model.template import dated_kwargs, render
from kvq.model.tokenizer import Tokenizer, encode, encode_text, encode_texts, load_tokenizer
from kvq.store.keys import TokenIds

__all__ = [
    "Chat",
    "ChatPrefix",
    "dated_kwargs",
    "encode_chat_prefix",
    "encode_chat_prefixes",
    "encode_messages",
    "encode_text",
    "encode_texts",
    "load_tokenizer",
    "stable_chat_boundary",
]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """What a chat template is given. `chat_template_kwargs` are exactly the caller's."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    *,
    now: datetime | None = None,
) -> TokenIds:
    """Token ids (uint32) of a whole chat: rendered once, tokenized once, no token doubled.

    `chat_template_kwargs` go to the template as they are; nothing such as `enable_thinking` is
    added. A template that writes the date gets that of the key `date` in them (ISO 8601: a day or
    a time), else of `now`, else of this moment: whoever resumes must give what was given when the
    prompt was stored. Raises UsageError for messages that are none, and TemplateError, one of its
    kind, with the template's reason.
    """
    text = render(
        tokenizer,
        check_messages(messages),
        check_tools(tools),
        chat_template_kwargs,
        add_generation_prompt=add_generation_prompt,
        now=now,
    )
    return encode(tokenizer, [text])[0]


def encode_chat_prefix(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    now: datetime | None = None,
) -> TokenIds:
    """Token ids (uint32) of a chat up to its stable boundary.

    They begin `encode_messages` of the same messages, and of these messages with the one that
    follows, whatever it says: after a user an answer or more from the user, after a call a tool's
    result, after a result an answer or another, after a system message or an answer a user. So
    they hold no generation prompt, and no thinking block that the next message makes the template
    drop. Raises as `encode_messages` does.
    """
    chat = Chat(messages=messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
    found = encode_chat_prefixes(tokenizer, [chat], now=now)[0]
    if isinstance(found, UsageError):
        raise found
    return found.ids[: found.stable]


def stable_chat_boundary(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    now: datetime | None = None,
) -> int:
    """How many tokens of a chat stay as they are whatever follows. Raises as `encode_messages`."""
    return len(encode_chat_prefix(tokenizer, messages, tools, chat_template_kwargs, now=now))


def encode_chat_prefixes(
    tokenizer: Tokenizer, chats: Sequence[Chat], *, now: datetime | None = None
) -> list[ChatPrefix | UsageError]:
    """What to store of each chat, in order, or the error in its place; uses all cores.

    Raises MissingExtra, which no chat is to blame for.
    """
    now = now or datetime.now()
    errors: list[UsageError | None] = []
    rendered: list[Renderings] = []
    for chat in chats:
        try:
            rendered.append(_follow_ups(tokenizer, chat, now))
            errors.append(None)
        except MissingExtra:
            raise
        except UsageError as error:
            errors.append(error)
    found = iter(chat_prefixes(tokenizer, rendered))
    return [next(found) if error is None else error for error in errors]


def _follow_ups(tokenizer: Tokenizer, chat: Chat, now: datetime) -> Renderings:
    tools = check_tools(chat.tools)

    def rendered(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return render(
            tokenizer,
            messages,
            tools,
            chat.chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            now=now,
        )

    return follow_ups(check_messages(chat.messages), rendered)
