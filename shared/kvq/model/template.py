"""Rendering chat templates: text out, named errors, and a clock that stands still."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from kvq.errors import MissingExtra, TemplateError
from kvq.model.messages import Message
from kvq.model.tokenizer import Tokenizer, plain

#: Key of `chat_template_kwargs` that sets the clock of templates that ask for the time.
DATE = "date"

# What decides how kvq itself calls the template, and is no business of the template.
_RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
    }
)
_CLOCK_CALL = re.compile(
    r"\bstrftime_now\(\s*(?:format\s*=\s*)?"
    r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')\s*\)"""
)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool,
    now: datetime | None = None,
) -> str:
    """The text that the model's chat template makes of checked `messages`.

    A template that writes the date gets that of `chat_template_kwargs["date"]` (ISO 8601: a day
    or a time), else of `now`, else of this moment. Raises TemplateError with the template's
    reason, MissingExtra without Jinja.
    """
    hf = plain(tokenizer)
    kwargs = dict(chat_template_kwargs or {})
    if clash := sorted(_RESERVED & kwargs.keys()):
        raise TemplateError(f"chat_template_kwargs cannot set {clash[0]!r}: remove it")
    if getattr(hf, "chat_template", None) is None and "chat_template" not in kwargs:
        raise TemplateError(
            "the model has no chat template: give the prompt as text, "
            'or a template as "chat_template" in chat_template_kwargs'
        )
    try:
        if source := _asks_for_time(hf, kwargs, tools):
            moment = _moment(kwargs.pop(DATE, None), now)
            kwargs["chat_template"] = _stopped_clock(source, moment.isoformat())
        rendered = hf.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
    except TemplateError:
        raise
    except ImportError as error:
        raise MissingExtra("jinja2", "producer") from error
    # A template is a program of its own: it can fail in any way that Python can.
    except Exception as error:
        raise TemplateError(_reason(error)) from error
    return str(rendered)


def dated_kwargs(
    tokenizer: Tokenizer,
    chat_template_kwargs: Mapping[str, Any] | None,
    tools: Sequence[Message] | None,
    now: datetime,
) -> dict[str, Any] | None:
    """The kwargs that give the same text on any later day: `date` added if the template asks.

    None when there is nothing to tell. Otherwise they are what the caller gave.
    """
    kwargs = dict(chat_template_kwargs or {})
    if DATE not in kwargs and _asks_for_time(plain(tokenizer), kwargs, tools):
        kwargs[DATE] = now.isoformat(timespec="seconds")
    return kwargs or None


def _asks_for_time(hf: Tokenizer, kwargs: Mapping[str, Any], tools: object) -> str | None:
    # The template's source when it has a call to the clock.
    given = kwargs.get("chat_template")
    if isinstance(given, str) and given not in _named_templates(hf):
        source: Any = given
    else:
        try:
            source = hf.get_chat_template(given, tools=tools)
        except (AttributeError, TypeError, ValueError):
            return None  # rendering reports it
    return source if isinstance(source, str) and "strftime_now" in source else None


def _named_templates(hf: Tokenizer) -> Mapping[str, str]:
    templates = getattr(hf, "chat_template", None)
    return templates if isinstance(templates, dict) else {}


def _moment(given: object, now: datetime | None) -> datetime:
    if given is None:
        return now if now is not None else datetime.now()
    if isinstance(given, str):
        try:
            return datetime.fromisoformat(given)
        except ValueError:
            pass
    raise TemplateError(
        f'"date" in chat_template_kwargs must be such as "2026-07-31", not {given!r}'
    )


@lru_cache(maxsize=32)
def _stopped_clock(source: str, moment: str) -> str:
    """`source` with each call to the clock as the text that it gives at `moment`.

    transformers passes plain data to templates and nothing that could be called, so a clock cannot
    be handed in. A call whose format is not written out stays a call, and tells the true time.
    """
    time = datetime.fromisoformat(moment)

    def written_out(call: re.Match[str]) -> str:
        literal = call[1] if call[1] is not None else call[2]
        form = literal.encode("ascii", "backslashreplace").decode("unicode-escape")
        return json.dumps(time.strftime(form))

    return _CLOCK_CALL.sub(written_out, source)


def _reason(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    text = text if len(text) <= 400 else text[:397] + "..."
    # Exactly this class is what a template's own raise_exception gives.
    if type(error).__module__ == "jinja2.exceptions" and type(error).__name__ == "TemplateError":
        return f"the chat template refuses these messages: {text}"
    return f"the chat template fails on these messages ({type(error).__name__}): {text}"
