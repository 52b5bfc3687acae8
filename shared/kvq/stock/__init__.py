"""Stock mlx-lm prompt-cache files: every generation read, two written, each file whole or absent.

`read_prompt_cache` and `write_prompt_cache` are the pair to use. `save_prompt_cache`,
`load_prompt_cache`, `can_trim_prompt_cache`, `trim_prompt_cache` and `make_prompt_cache` have the
signatures of mlx-lm's functions of these names and can stand in for them.
"""

from __future__ import annotations

from kvq.stock.dropin import load_prompt_cache, make_prompt_cache, save_prompt_cache
from kvq.stock.promptfile import Generation, PromptCacheFile
from kvq.stock.read import read_prompt_cache
from kvq.stock.trim import can_trim_prompt_cache, trim_prompt_cache
from kvq.stock.write import write_prompt_cache

__all__ = [
    "Generation",
    "PromptCacheFile",
    "can_trim_prompt_cache",
    "load_prompt_cache",
    "make_prompt_cache",
    "read_prompt_cache",
    "save_prompt_cache",
    "trim_prompt_cache",
    "write_prompt_cache",
]
