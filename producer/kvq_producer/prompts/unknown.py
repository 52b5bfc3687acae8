"""Keys of a line that mean nothing here, so that a misspelled one does not pass in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from kvq_producer.prompts.fields import FIELDS
from kvq_producer.prompts.forms import PROMPT_KEYS

#: Keys that are reported in one file; one of another kind may have any number.
MAX_REPORTED = 20

# What batch files say about the answer: it does not change the prompt.
_ABOUT_THE_ANSWER = frozenset(
    {
        "best_of",
        "echo",
        "extra_body",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_new_tokens",
        "max_output_tokens",
        "max_tokens",
        "min_p",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "reasoning_effort",
        "repetition_penalty",
        "response_format",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
    }
)
_KNOWN = PROMPT_KEYS | _ABOUT_THE_ANSWER | set(FIELDS)


class UnknownKeys:
    """Remembers the unknown keys of a file, to name each once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def warnings(self, number: int, line: Mapping[str, Any]) -> Iterator[str]:
        """A sentence for each key of `line` that is unknown and was not seen before."""
        for key in sorted(line.keys() - _KNOWN - self._seen):
            if len(self._seen) >= MAX_REPORTED:
                return
            self._seen.add(key)
            near = get_close_matches(key, (*FIELDS, *PROMPT_KEYS), n=1, cutoff=0.7)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            yield f"line {number}: the key {key[:60]!r} is ignored{hint}"
