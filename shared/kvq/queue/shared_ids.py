"""Token ids that several jobs begin with, held in Redis once instead of in every job."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvq.errors import InvalidMessage
from kvq.queue import fields

#: Tokens in the longest prompt that a message can carry.
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """Leading token ids that several jobs share, held in Redis once under a digest of them."""

    digest: str
    tokens: int

    @classmethod
    def of(cls, packed: bytes) -> SharedPrefix:
        """The prefix that `packed` (4 bytes a token) is."""
        return cls(digest=_digest(packed), tokens=len(packed) // 4)

    @classmethod
    def decode(cls, source: Any) -> SharedPrefix | None:
        """The prefix in a message, None when it has none. Raises InvalidMessage."""
        if source is None:
            return None
        if not isinstance(source, list) or len(source) != 2:
            raise InvalidMessage("prefix is not a pair of digest and length")
        parts = {"prefix digest": source[0], "prefix length": source[1]}
        digest = fields.string(parts, "prefix digest", 40)
        if len(digest) != 40 or set(digest) - set("0123456789abcdef"):
            raise InvalidMessage("prefix digest is not 40 hexadecimal digits")
        tokens = fields.integer(parts, "prefix length", 1, MAX_TOKENS)
        return cls(digest=digest, tokens=tokens)

    def encode(self) -> list[Any]:
        """As it stands in a message."""
        return [self.digest, self.tokens]

    @property
    def key(self) -> str:
        """Redis key of the packed ids."""
        return f"kvq:ids:{self.digest}"

    def checked(self, packed: bytes | None) -> bytes:
        """`packed` if it is what this prefix stands for. Raises InvalidMessage."""
        if packed is None:
            raise InvalidMessage("the shared token ids are no longer in Redis: submit again")
        if len(packed) != self.tokens * 4 or _digest(packed) != self.digest:
            raise InvalidMessage("the shared token ids in Redis are not those of this job")
        return packed


def _digest(packed: bytes) -> str:
    return blake2b(packed, digest_size=20, person=b"kvq-ids").hexdigest()
