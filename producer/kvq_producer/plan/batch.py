"""A batch of distinct prompts: 20 bytes of memory a block, token ids on disk."""

from __future__ import annotations

from array import array

from kvq.errors import UsageError
from kvq.store.keys import BLOCK, KEY_BYTES, ROOT, TokenIds, chain_keys, child_key
from kvq_producer.plan.spool import Spool
from kvq_producer.plan.values import Group, TokenizedPrompt


class Batch:
    """The distinct prompts of a batch, numbered in the order they came.

    Prompts equal in group and ids are one; it remembers every custom id.
    """

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.groups: dict[Group, list[int]] = {}
        self.lengths = array("q")
        self.offsets = array("q")
        self.priorities = array("q")
        #: Chain key of each whole prompt.
        self.keys: list[bytes] = []
        self._custom_ids: list[str] = []
        self._more_custom_ids: dict[int, list[str]] = {}
        self._numbers: dict[Group, dict[bytes, int]] = {}
        self._first_block = array("q")
        self._block_keys = bytearray()

    def add(self, prompt: TokenizedPrompt) -> None:
        """Take in one prompt. Raises UsageError when it has no tokens or the disk is full."""
        if not len(prompt.ids):
            raise UsageError(f"prompt {prompt.custom_id!r} has no tokens")
        keys = b"".join(chain_keys(prompt.ids))
        known = self._numbers.setdefault(prompt.group, {})
        key = _chain_key(keys, prompt.ids)
        number = known.setdefault(key, len(self.lengths))
        if number < len(self.lengths):
            self._more_custom_ids.setdefault(number, []).append(prompt.custom_id)
            self.priorities[number] = max(self.priorities[number], prompt.priority)
            return
        self.groups.setdefault(prompt.group, []).append(number)
        self.lengths.append(len(prompt.ids))
        self.offsets.append(self.spool.append(prompt.ids))
        self.priorities.append(prompt.priority)
        self._custom_ids.append(prompt.custom_id)
        self.keys.append(key)
        self._first_block.append(len(self._block_keys) // KEY_BYTES)
        self._block_keys += keys

    def custom_ids(self, prompt: int) -> tuple[str, ...]:
        """The custom ids that the prompt came with, at least one."""
        return (self._custom_ids[prompt], *self._more_custom_ids.get(prompt, ()))

    def count(self, prompt: int) -> int:
        """How many custom ids the prompt came with."""
        return 1 + len(self._more_custom_ids.get(prompt, ()))

    def block_key(self, prompt: int, depth: int) -> bytes:
        """Key of the prompt's full block number `depth`, counted from 0."""
        start = (self._first_block[prompt] + depth) * KEY_BYTES
        return bytes(self._block_keys[start : start + KEY_BYTES])

    def prefix_key(self, prompt: int, tokens: int) -> bytes:
        """Chain key of the prompt's leading `tokens`."""
        depth, rest = divmod(tokens, BLOCK)
        key = self.block_key(prompt, depth - 1) if depth else ROOT
        if not rest:
            return key
        return child_key(key, self.spool.ids(self.offsets[prompt] + depth * BLOCK, rest))

    def head(self, prompt: int, at: int, tokens: int) -> bytes:
        """Up to `tokens` ids of the prompt from position `at` on, 4 big-endian bytes each."""
        return self.spool.read(self.offsets[prompt] + at, min(tokens, self.lengths[prompt] - at))

    def ids(self, prompt: int) -> TokenIds:
        """All ids of the prompt, uint32."""
        return self.spool.ids(self.offsets[prompt], self.lengths[prompt])


def _chain_key(keys: bytes, ids: TokenIds) -> bytes:
    rest = len(ids) % BLOCK
    last = keys[-KEY_BYTES:] or ROOT
    return child_key(last, ids[-rest:]) if rest else last
