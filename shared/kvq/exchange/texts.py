"""Which tokens a stock file's caches cover, where only the text is known."""

from __future__ import annotations

from typing import Any

from kvq.errors import UsageError
from kvq.model.tokenizer import encode, encode_text, plain
from kvq.store.keys import TokenIds


def ids_of_text(tokenizer: Any, text: str, tokens: int | None) -> TokenIds:
    """Token ids of the `text` that `mlx_lm.cache_prompt` was given, `tokens` of them.

    It renders the text as a user's message where the model has a chat template; earlier versions
    and other programs do not, so the text as it is counts too. Without a count (None) the first
    of these is taken. Raises UsageError where none has that many tokens.
    """
    found = {how: ids for how, ids in _readings(tokenizer, text)}
    for ids in found.values():
        if tokens in (None, len(ids)):
            return ids
    counts = " and ".join(f"{len(ids)} tokens {how}" for how, ids in found.items())
    raise UsageError(f"its caches cover {tokens} tokens, but the text has {counts}")


def _readings(tokenizer: Any, text: str) -> list[tuple[str, TokenIds]]:
    readings = []
    hf = plain(tokenizer)
    if getattr(hf, "chat_template", None) is not None:
        message = [{"role": "user", "content": text}]
        try:
            rendered = hf.apply_chat_template(
                message, tokenize=False, add_generation_prompt=False, continue_final_message=True
            )
            readings.append(("as a user's message", encode(tokenizer, [rendered])[0]))
        # A template raises what it likes; then mlx_lm.cache_prompt did not use it either.
        except Exception:
            pass
    readings.append(("as it is", encode_text(tokenizer, text)))
    return readings
