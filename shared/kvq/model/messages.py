"""Chat messages as templates take them: checked, and with text contents as one string."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvq.errors import UsageError

#: Content blocks that hold text, in the dialects of the common APIs.
TEXT_BLOCKS = frozenset({"text", "input_text", "output_text"})

Message = dict[str, Any]


def check_messages(messages: object) -> list[Message]:
    """A copy of `messages` in the form that chat templates take.

    Each message is an object with a `role` and, unless it calls tools, a `content`: a string, or
    a list of text blocks, which are joined as they are. Keys that are null are dropped, a missing
    content becomes an empty one, and the arguments of tool calls become objects where they are
    JSON text of one. Other keys are kept.
    Raises UsageError, naming the message by its number from 1.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UsageError(f"messages must be a list, not {kind_of(messages)}")
    if not messages:
        raise UsageError("messages is empty: give at least one message")
    return [_checked(message, f"message {number}") for number, message in enumerate(messages, 1)]


def check_tools(tools: object) -> list[Message] | None:
    """A copy of `tools` (a list of objects), or None when there are none. Raises UsageError."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise UsageError(f"tools must be a list, not {kind_of(tools)}")
    for number, tool in enumerate(tools, 1):
        if not isinstance(tool, Mapping):
            raise UsageError(f"tool {number} must be an object, not {kind_of(tool)}")
    return [dict(tool) for tool in tools] or None


def joined_text(content: object, where: str) -> str:
    """The text of `content`: a string, or a list of text blocks. Raises UsageError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UsageError(
            f"the content of {where} must be a string or a list of text blocks, "
            f"not {kind_of(content)}"
        )
    return "".join(
        _block_text(block, f"content block {number} of {where}")
        for number, block in enumerate(content, 1)
    )


def kind_of(value: object) -> str:
    """What `value` is, in the words of JSON: `a string`, `an object`, `null`..."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return "a string"
        case int():
            return "an integer"
        case float():
            return "a number"
        case Mapping():
            return "an object"
        case Sequence():
            return "a list"
    return f"a {type(value).__name__}"


def _checked(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise UsageError(
            f'{where} must be an object with "role" and "content", not {kind_of(message)}'
        )
    checked = {key: value for key, value in message.items() if value is not None}
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(
            f"{where} has no role: give one such as system, user, assistant or tool"
            if role is None or role == ""
            else f"the role of {where} must be a string, not {kind_of(role)}"
        )
    if calls := checked.get("tool_calls"):
        checked["tool_calls"] = _with_parsed_arguments(calls, where)
    if "content" in checked:
        checked["content"] = joined_text(checked["content"], where)
    elif calls:
        checked["content"] = ""  # many templates fail without
    else:
        raise UsageError(f'{where} has no content: give its text as "content"')
    return checked


def _block_text(block: object, where: str) -> str:
    if not isinstance(block, Mapping):
        raise UsageError(f"{where} must be an object, not {kind_of(block)}")
    kind = block.get("type")
    if kind not in TEXT_BLOCKS:
        named = f"of type {kind!r}" if isinstance(kind, str) else "without a type"
        raise UsageError(f"{where} is {named}: only text can be prefilled")
    text = block.get("text")
    if not isinstance(text, str):
        raise UsageError(f'{where} must have its text as a string in "text"')
    return text


def _with_parsed_arguments(calls: object, where: str) -> list[Any]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise UsageError(f"tool_calls of {where} must be a list, not {kind_of(calls)}")
    parsed = []
    for number, call in enumerate(calls, 1):
        if not isinstance(call, Mapping):
            raise UsageError(
                f"tool call {number} of {where} must be an object, not {kind_of(call)}"
            )
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            # Many templates walk the arguments; APIs carry them as JSON text.
            arguments = _object_or(function["arguments"])
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(dict(call))
    return parsed


def _object_or(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
