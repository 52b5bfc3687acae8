"""What the batch dialects of the large APIs write differently from a chat template's input."""

from __future__ import annotations

from typing import Any

from kvq.errors import UsageError
from kvq.model.messages import Message, kind_of

_URLS = {"/chat/completions": "messages", "/completions": "prompt", "/responses": "input"}


def url_carrier(url: Any) -> str | None:
    """The key of the body that holds the prompt of a request to `url`; None without a url."""
    if url is None:
        return None
    if not isinstance(url, str):
        raise UsageError(f"url must be a string, not {kind_of(url)}")
    path = url.split("?")[0].rstrip("/")
    for ending, carrier in _URLS.items():
        if path.endswith(ending):
            return carrier
    raise UsageError(
        f"url {url[:80]!r} has no prompt to prefill: "
        "use /v1/chat/completions, /v1/completions or /v1/responses"
    )


def openai_tools(tools: Any) -> list[Message]:
    """Function tools of chat completions as they are, and those of responses in the same form."""
    return [_openai_tool(tool, number) for number, tool in enumerate(_list(tools), 1)]


def anthropic_tools(tools: Any) -> list[Message]:
    """Anthropic's tools in the form that chat templates take."""
    return [_anthropic_tool(tool, number) for number, tool in enumerate(_list(tools), 1)]


def response_messages(given: Any) -> list[Message]:
    """The messages in the `input` of a responses request: a string, or a list of messages."""
    if isinstance(given, str):
        if not given:
            raise UsageError("the input is empty")
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise UsageError(f"input must be a string or a list, not {kind_of(given)}")
    messages = []
    for number, item in enumerate(given, 1):
        if not isinstance(item, dict):
            raise UsageError(f"item {number} of input must be an object, not {kind_of(item)}")
        kind = item.get("type", "message")
        if kind != "message":
            raise UsageError(
                f"item {number} of input is of type {str(kind)[:40]!r}: only messages are supported"
            )
        messages.append(
            {key: one for key, one in item.items() if key not in ("type", "id", "status")}
        )
    return messages


def _openai_tool(tool: Any, number: int) -> Message:
    kind = _object(tool, number).get("type", "function")
    if kind != "function":
        raise UsageError(_hosted(number, kind))
    if "function" in tool or "name" not in tool:
        return dict(tool)
    function = {key: one for key, one in tool.items() if key not in ("type", "strict")}
    return {"type": "function", "function": function}


def _anthropic_tool(tool: Any, number: int) -> Message:
    kind = _object(tool, number).get("type", "custom")
    if kind not in ("custom", None):
        raise UsageError(_hosted(number, kind))
    function = {key: tool[key] for key in ("name", "description") if key in tool}
    if "input_schema" in tool:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _list(tools: Any) -> list[Any]:
    if not isinstance(tools, list):
        raise UsageError(f"tools must be a list, not {kind_of(tools)}")
    return tools


def _object(tool: Any, number: int) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise UsageError(f"tool {number} must be an object, not {kind_of(tool)}")
    return tool


def _hosted(number: int, kind: Any) -> str:
    return (
        f"tool {number} is of type {str(kind)[:40]!r}, which is not part of the prompt: "
        "only functions are"
    )
