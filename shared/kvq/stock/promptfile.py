"""What reading a stock prompt-cache file gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvq.stock.leaves import covered_tokens

#: P: up to mlx-lm 0.19.0. A: 0.19.1 to 0.28.0. B: 0.28.1 to 0.31.3. C: from 0.32.0.
#: swift: mlx-swift-lm. Where two of them write the same bytes, the first in this order.
Generation = Literal["P", "A", "B", "C", "swift"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptCacheFile:
    """A prompt cache read from a file; nothing in it still depends on the file."""

    #: One mlx-lm cache for each entry of the model's `make_prompt_cache`, evaluated.
    cache: list[Any]
    #: As it was written: any JSON from `write_prompt_cache`, a flat dict of strings from others.
    metadata: Any
    #: uint32, shape [tokens]; None where the file does not hold them, as files of others never do.
    token_ids: np.ndarray | None
    generation: Generation

    @property
    def tokens(self) -> int | None:
        """How many tokens the caches cover; None where they do not say (recurrent layers only)."""
        return covered_tokens(self.cache)
