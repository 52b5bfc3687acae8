"""The dialects of a line: each is reduced to one of a text, messages or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from kvq.errors import UsageError
from kvq.model.messages import check_messages, check_tools, joined_text, kind_of
from kvq_producer.prompts.dialects import (
    anthropic_tools,
    openai_tools,
    response_messages,
    url_carrier,
)

#: Largest token id plus one: ids are stored as unsigned 32-bit integers.
MAX_TOKEN_ID = 1 << 32

Content = dict[str, Any]

_CARRIERS = ("prompt", "text", "messages", "token_ids")
_BODY_CARRIERS = ("prompt", "messages", "input", "token_ids")
_CHAT_KEYS = ("tools", "chat_template_kwargs", "system", "instructions")

#: Keys that belong to a prompt, beside the optional fields.
PROMPT_KEYS = frozenset({*_CARRIERS, *_CHAT_KEYS, "body", "params", "method", "url"})

_MISNAMED = {
    "tokens": "token_ids",
    "ids": "token_ids",
    "input_ids": "token_ids",
    "prompt_token_ids": "token_ids",
    "input": "prompt",
    "inputs": "prompt",
    "instruction": "prompt",
    "question": "prompt",
    "query": "prompt",
    "content": "text",
    "conversation": "messages",
    "conversations": "messages",
    "chat": "messages",
}
# These would change the prompt, so to ignore them would store the cache of another one.
_REFUSED = {
    "functions": 'write them as "tools"',
    "documents": 'put them into "chat_template_kwargs"',
    "chat_template": 'put it into "chat_template_kwargs"',
    "previous_response_id": "write the whole conversation into this line",
    "conversation": "write the whole conversation into this line",
    "suffix": "only what comes before the answer can be prefilled",
}


def content_of(value: Any) -> Content:
    """The prompt in a line's JSON value, by the names of `Prompt`.

    That is `text`, `token_ids`, or `messages` with `tools` and `chat_template_kwargs`. Raises
    UsageError with what to do.
    """
    if isinstance(value, list):
        return _message_list(value)
    if not isinstance(value, dict):
        hint = ': write {"text": ...}' if isinstance(value, str) else ""
        raise UsageError(
            f"a line must be an object or a list of messages, not {kind_of(value)}{hint}"
        )
    carried = [key for key in ("body", "params", *_CARRIERS) if value.get(key) is not None]
    if len(carried) > 1:
        raise UsageError(_too_many(carried))
    if carried == ["body"]:
        return _openai(value)
    if carried == ["params"]:
        return _anthropic(value)
    if not carried:
        raise UsageError(_no_prompt(value))
    return _content(value, carried[0])


def inner_of(value: Any) -> Mapping[str, Any]:
    """The request inside a batch line, where its `model` and `metadata` may stand; else empty."""
    if isinstance(value, dict):
        for key in ("body", "params"):
            if isinstance(value.get(key), dict):
                return dict(value[key])
    return {}


def _message_list(value: list[Any]) -> Content:
    first = value[0] if value else None
    if isinstance(first, dict) and "role" not in first and _CARRIERS_AND_BODIES & first.keys():
        raise UsageError("a list of prompts: write each on a line of its own, without the list")
    if isinstance(first, int) and not isinstance(first, bool):
        raise UsageError('a list of numbers: write {"token_ids": [...]}')
    return {"messages": check_messages(value)}


def _openai(value: Mapping[str, Any]) -> Content:
    body = _request(value, "body")
    method = value.get("method")
    if method is not None and (not isinstance(method, str) or method.upper() != "POST"):
        raise UsageError('method must be "POST"')
    carried = [key for key in _BODY_CARRIERS if body.get(key) is not None]
    if len(carried) > 1:
        raise UsageError(_too_many(carried, " in body"))
    wanted = url_carrier(value.get("url"))
    if wanted is not None and carried != [wanted]:
        instead = f', not "{carried[0]}"' if carried else ""
        raise UsageError(f'the body of a line for {value["url"]} needs "{wanted}"{instead}')
    if not carried:
        raise UsageError(_no_prompt(body, " in body"))
    if carried == ["input"]:
        messages = response_messages(body["input"])
        body = {**body, "messages": messages, "system": body.get("instructions")}
        body.pop("instructions", None)
        carried = ["messages"]
    if body.get("tools") is not None:
        body = {**body, "tools": openai_tools(body["tools"])}
    return _content(body, carried[0])


def _anthropic(value: Mapping[str, Any]) -> Content:
    params = _request(value, "params")
    carried = [key for key in ("messages", "prompt") if params.get(key) is not None]
    if len(carried) > 1:
        raise UsageError(_too_many(carried, " in params"))
    if not carried:
        raise UsageError(_no_prompt(params, " in params"))
    if params.get("tools") is not None:
        params = {**params, "tools": anthropic_tools(params["tools"])}
    return _content(params, carried[0])


def _request(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    request = value[key]
    if not isinstance(request, dict):
        raise UsageError(f"{key} must be an object, not {kind_of(request)}")
    if misplaced := [name for name in ("name", "ttl", "pin", "codec") if name in request]:
        raise UsageError(f'"{misplaced[0]}" belongs beside "{key}", not inside it')
    return request


def _content(value: Mapping[str, Any], carrier: str) -> Content:
    for key, advice in _REFUSED.items():
        if value.get(key):
            raise UsageError(f'"{key}" is not supported: {advice}')
    if carrier == "messages":
        return _chat(value)
    for key in _CHAT_KEYS:
        if value.get(key):
            raise UsageError(f'"{key}" goes with "messages" only, and this line has "{carrier}"')
    given = value[carrier]
    if carrier == "token_ids" or (carrier == "prompt" and _numbers(given)):
        return {"token_ids": _token_ids(given, carrier)}
    if isinstance(given, list):
        raise UsageError(f"{carrier} is a list of {len(given)}: write one line for each prompt")
    if not isinstance(given, str):
        raise UsageError(f"{carrier} must be a string, not {kind_of(given)}")
    if not given:
        raise UsageError(f"the {carrier} is empty")
    return {"text": given}


def _chat(value: Mapping[str, Any]) -> Content:
    messages = check_messages(value["messages"])
    if value.get("instructions"):
        raise UsageError('"instructions" goes with "input" only: write a system message')
    if (system := value.get("system")) is not None:
        text = joined_text(system, "system")
        messages = [{"role": "system", "content": text}, *messages] if text else messages
    content: Content = {"messages": messages, "tools": check_tools(value.get("tools"))}
    kwargs = value.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise UsageError(f"chat_template_kwargs must be an object, not {kind_of(kwargs)}")
    return content | {"chat_template_kwargs": kwargs or None}


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)


def _token_ids(value: Any, carrier: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{carrier} must be a list of integers, not {kind_of(value)}")
    if not value:
        raise UsageError(f"{carrier} is empty")
    # Whole-list checks first: a prompt may have a million ids.
    if set(map(type, value)) != {int}:
        at = next(at for at, one in enumerate(value) if type(one) is not int)
        raise UsageError(f"{carrier} must be integers: number {at + 1} is {kind_of(value[at])}")
    if min(value) < 0 or max(value) >= MAX_TOKEN_ID:
        at = next(at for at, one in enumerate(value) if not 0 <= one < MAX_TOKEN_ID)
        wrong = "negative" if value[at] < 0 else "2**32 or more"
        raise UsageError(
            f"{carrier} must be at least 0 and below 2**32: number {at + 1} is {wrong}"
        )
    return tuple(value)


_CARRIERS_AND_BODIES = frozenset({*_CARRIERS, "body", "params", "custom_id"})


def _too_many(carried: Sequence[str], where: str = "") -> str:
    named = " and ".join(f'"{key}"' for key in carried)
    return f"more than one prompt{where}: keep one of {named}"


def _no_prompt(value: Mapping[str, Any], where: str = "") -> str:
    if "role" in value and "content" in value:
        return "a single message: write the messages of one chat as a list on one line"
    choices = 'give one of "prompt", "text", "messages" or "token_ids"'
    for key in value:
        if key in _MISNAMED and not (where and key == "input"):
            return f'no prompt{where}: did you mean "{_MISNAMED[key]}" instead of "{key}"?'
        near = get_close_matches(key, (*_CARRIERS, "body", "params"), n=1, cutoff=0.7)
        if near and near[0] != key:
            return f'no prompt{where}: did you mean "{near[0]}" instead of {_quoted(key)}?'
    return f"no prompt{where}: {choices}"


def _quoted(key: str) -> str:
    return f'"{key[:40]}"'
