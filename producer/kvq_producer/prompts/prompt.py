"""One prompt of a prompts file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvq.model.messages import Message


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt and what is to become of its cache.

    Exactly one of `text`, `messages` and `token_ids` is set. `custom_id` is unique in its file;
    where the line gives none it is `line-<number>`. `ttl` is seconds; `priority` 0 is usual and
    more is sooner; None means that the line says nothing.
    """

    line: int
    custom_id: str
    name: str | None = None
    model: str | None = None
    ttl: float | None = None
    pin: bool = False
    codec: str | None = None
    priority: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    messages: list[Message] | None = None
    tools: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    token_ids: tuple[int, ...] | None = None
