"""Prompts files: JSON lines of several dialects to `Prompt` values, every fault with its line."""

from __future__ import annotations

from kvq_producer.prompts.faults import Fault, Faults
from kvq_producer.prompts.prompt import Prompt
from kvq_producer.prompts.reader import PromptFile, open_prompts, read_prompts

__all__ = ["Fault", "Faults", "Prompt", "PromptFile", "open_prompts", "read_prompts"]
