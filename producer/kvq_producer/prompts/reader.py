"""From a stream of lines to prompts and faults."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kvq.errors import UsageError
from kvq.store.names import file_key
from kvq_producer.prompts.faults import Faults
from kvq_producer.prompts.fields import FIELDS, check_fields
from kvq_producer.prompts.forms import content_of, inner_of
from kvq_producer.prompts.lines import MAX_LINE, decode_line, read_lines
from kvq_producer.prompts.prompt import Prompt
from kvq_producer.prompts.unknown import UnknownKeys


class PromptFile:
    """The prompts of one stream, to be iterated once: each line becomes a prompt or faults.

    Reading holds one line at a time, and the ids and names that must not come twice. `faults` and
    `warnings` are complete once the iteration is. To refuse a file with any fault, iterate, then
    call `check` (or `read_all`); to skip what is wrong, do not call it.
    """

    def __init__(self, stream: BinaryIO, source: str, max_line: int = MAX_LINE) -> None:
        self.source = source
        self.faults = Faults(source)
        #: Sentences about keys that are not known, one for each key.
        self.warnings: list[str] = []
        #: Prompts given, and bytes read, so far.
        self.prompts = 0
        self.bytes = 0
        self._stream = stream
        self._max_line = max_line
        self._ids: dict[str, int] = {}
        self._names: dict[str, tuple[int, str]] = {}
        self._unknown = UnknownKeys()

    def __iter__(self) -> Iterator[Prompt]:
        """Raises UsageError when the stream fails."""
        for number, line in read_lines(self._stream, self.source, self._max_line):
            if isinstance(line, UsageError):
                self.faults.add(number, [str(line)])
                continue
            self.bytes += len(line) + 1
            try:
                value = decode_line(line)
            except UsageError as error:
                self.faults.add(number, [str(error)])
                continue
            prompt = self._prompt(number, value)
            if prompt is not None:
                self.prompts += 1
                yield prompt

    def read_all(self) -> list[Prompt]:
        """All prompts. Raises as `check` does."""
        prompts = list(self)
        self.check()
        return prompts

    def check(self) -> None:
        """Raises InvalidPrompts when a line has a fault, UsageError when there is no prompt."""
        self.faults.check()
        if not self.prompts:
            raise UsageError(f"{self.source} holds no prompts: write one JSON object a line")

    def _prompt(self, number: int, value: Any) -> Prompt | None:
        content: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        reasons: list[str] = []
        try:
            content = content_of(value)
        except UsageError as error:
            reasons.append(str(error))
        if isinstance(value, dict):
            self.warnings += self._unknown.warnings(number, value)
            inner = inner_of(value)
            given, request = value.get("model"), inner.get("model")
            if given is not None and request is not None and given != request:
                reasons.append("two models: the line names one and its request another")
            outer = {key: inner[key] for key in ("model", "metadata") if key in inner}
            outer |= {key: value[key] for key in FIELDS if value.get(key) is not None}
            fields, wrong = check_fields(outer)
            reasons += wrong
        reasons += self._repeated(number, fields)
        if reasons:
            self.faults.add(number, reasons)
            return None
        return Prompt(line=number, **{"custom_id": f"line-{number}", **fields, **content})

    def _repeated(self, number: int, fields: dict[str, Any]) -> Iterator[str]:
        custom_id = fields.get("custom_id", f"line-{number}")
        first = self._ids.setdefault(custom_id, number)
        if first != number:
            yield f"custom_id {_short(custom_id)} is that of line {first}: each must be unique"
        if (name := fields.get("name")) is not None:
            first, other = self._names.setdefault(file_key(name), (number, name))
            if first != number:
                alike = "" if other == name else f", but for upper and lower case ({_short(other)})"
                yield f"name {_short(name)} is that of line {first}{alike}: each must be unique"


def read_prompts(stream: BinaryIO, source: str, *, max_line: int = MAX_LINE) -> PromptFile:
    """The prompts in a binary stream of JSON lines; `source` names it in messages.

    A line is, each with the optional `custom_id name model ttl pin codec priority metadata`:
    an OpenAI batch line (`body` for chat completions, completions or responses), an Anthropic one
    (`params`), `{"prompt"}` or `{"text"}`, `{"messages", "tools", "chat_template_kwargs",
    "system"}`, a bare list of messages, or `{"token_ids"}`. Blank lines are skipped.
    """
    return PromptFile(stream, source, max_line)


@contextmanager
def open_prompts(
    path: str | Path, *, stdin: BinaryIO | None = None, max_line: int = MAX_LINE
) -> Iterator[PromptFile]:
    """The prompts file at `path`, open until the block ends; `-` is `stdin`.

    Raises UsageError when it cannot be opened.
    """
    if str(path) == "-":
        yield read_prompts(stdin or sys.stdin.buffer, "standard input", max_line=max_line)
        return
    try:
        file = Path(path).expanduser().open("rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not a path") from error
    with file:
        yield read_prompts(file, str(path), max_line=max_line)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
