"""The stable boundary of a chat: where its rendering stops depending on what comes next.

A chat is rendered with several continuations; the tokens that all of them share stay valid for
whatever follows. Comparing tokens and not text keeps out a last token that joins what follows.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from kvq.errors import TemplateError
from kvq.model.messages import Message
from kvq.model.tokenizer import Tokenizer, check_text, encode, fast_backend, plain
from kvq.store.keys import TokenIds, common_prefix

#: Renders (messages, add_generation_prompt); raises TemplateError.
Render = Callable[[Sequence[Message], bool], str]

# Tokens that the stored part may lose for the sake of what follows later: a header's, or a joint's.
_SLACK = 16
# Beginnings that tokenizers join differently with what stands before them.
_BEGINNINGS = ("a", "\n0", " a", "0", "(", "")
_SYSTEM_ROLES = frozenset({"system", "developer"})
_ANSWER_ROLES = frozenset({"assistant", "model"})


@dataclass(frozen=True, kw_only=True)
class Renderings:
    """A chat with what can follow it: `now` what is asked for at once, `later` all else."""

    now: Sequence[str]
    later: Sequence[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatPrefix:
    """The token ids (uint32) to store of a chat; the first `stable` hold whatever follows.

    That is all of them, unless the template moves much of the chat as soon as there is an answer,
    as those do that write the system's text into the last question. Then the rest holds only for
    the answer itself.
    """

    ids: TokenIds
    stable: int


def follow_ups(messages: Sequence[Message], render: Render) -> Renderings:
    """Renderings of `messages` with what can follow them; those that a template refuses left out.

    After a message of a user or a tool comes a generation prompt, an answer, or one more of the
    same role; after a call, a tool's result; after any other answer, and after a system message,
    the user. Raises TemplateError when the template refuses the messages themselves.
    """
    role = messages[-1]["role"]
    open_end = role not in _SYSTEM_ROLES | _ANSWER_ROLES
    now = [render(messages, True)] if open_end else []
    later: list[str] = []
    refusal: TemplateError | None = None
    for message in _next_messages(messages[-1]):
        try:
            later.append(render([*messages, message], False))
        except TemplateError as error:
            refusal = refusal or error
    if not now and not later:
        assert refusal is not None
        raise refusal
    if role not in _SYSTEM_ROLES:
        # Where only one role can follow, its header is common to all continuations, but no part
        # of this conversation yet.
        try:
            bare = render(messages, False)
        except TemplateError:
            bare = None
        if bare is not None and all(text.startswith(bare) for text in now or later):
            (now if open_end else later).append(bare)
    if not open_end:
        now, later = later, []
    return Renderings(now=list(dict.fromkeys(now)), later=list(dict.fromkeys(later)))


def chat_prefixes(tokenizer: Tokenizer, chats: Sequence[Renderings]) -> list[ChatPrefix]:
    """What to store of each chat; uses all cores. Raises UsageError for text without tokens."""
    texts = [[*chat.now, *chat.later] for chat in chats]
    for some in texts:
        check_text(*some)
    cuts = list(_cuts(tokenizer, texts))
    tails = [text[cut.start :] for some, cut in zip(texts, cuts, strict=True) for text in some]
    ids = iter(encode(tokenizer, tails))
    found = []
    for chat, cut in zip(chats, cuts, strict=True):
        near = reduce(_common, [next(ids) for _ in chat.now])
        stable = reduce(_common, [next(ids) for _ in chat.later], near)
        kept = near if len(near) - len(stable) > _SLACK else stable
        found.append(
            ChatPrefix(ids=np.concatenate([cut.ids, kept]), stable=len(cut.ids) + len(stable))
        )
    return found


def _next_messages(last: Message) -> Iterator[Message]:
    role = last["role"]
    if calls := last.get("tool_calls"):
        name = (calls[0].get("function") or calls[0]).get("name", "")
        result = {"role": "tool", "name": name, "tool_call_id": calls[0].get("id", "")}
        yield from (result | {"content": text} for text in _BEGINNINGS)
    elif role in _SYSTEM_ROLES | _ANSWER_ROLES:
        yield from ({"role": "user", "content": text} for text in _BEGINNINGS)
    else:
        yield from ({"role": "assistant", "content": text} for text in _BEGINNINGS[:2])
        # A user may say more before an answer; a tool's result follows another's.
        yield from (last | {"content": text} for text in _BEGINNINGS[2:4])


class _Cut:
    """Where texts can be cut without changing their tokens, and the ids of what is before."""

    def __init__(self, start: int, ids: TokenIds) -> None:
        self.start = start
        self.ids = ids


def _cuts(tokenizer: Tokenizer, chats: Sequence[Sequence[str]]) -> Iterator[_Cut]:
    # Only one text of each chat is tokenized whole. Tokenizers first split a text at its special
    # tokens and then work on each part alone, so the ids before one are the same in all.
    backend = fast_backend(tokenizer)
    hard = _hard_tokens(tokenizer)
    empty = np.empty(0, dtype=np.uint32)
    if backend is None or not hard:
        yield from (_Cut(0, empty) for _ in chats)
        return
    known = sorted(plain(tokenizer).get_added_vocab())
    encodings = backend.encode_batch([texts[0] for texts in chats], add_special_tokens=False)
    for texts, encoding in zip(chats, encodings, strict=True):
        shared = _common_text(min(texts), max(texts))
        ids = encoding.ids
        for index in range(len(ids) - 1, -1, -1):
            if (token := hard.get(ids[index])) is None:
                continue
            start, end = encoding.token_to_chars(index)
            if end > len(shared) or shared[start:end] != token:
                continue
            if not _could_grow(shared[start:], known):
                yield _Cut(start, np.array(ids[:index], dtype=np.uint32))
                break
        else:
            yield _Cut(0, empty)


def _hard_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    added: dict[int, Any] = getattr(plain(tokenizer), "added_tokens_decoder", {})
    return {
        number: token.content
        for number, token in added.items()
        if token.special and not token.normalized and not token.single_word
    }


def _could_grow(rest: str, known: Sequence[str]) -> bool:
    # True when a longer token than the one that `rest` begins with could start there.
    at = bisect.bisect_right(known, rest)
    return at < len(known) and known[at].startswith(rest)


def _common_text(a: str, b: str) -> str:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return a[:low]


def _common(a: TokenIds, b: TokenIds) -> TokenIds:
    return a[: common_prefix(a, b)]
