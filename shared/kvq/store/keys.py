"""Token ids as bytes, and the keys of the trie that they form.

A block's key digests its parent's key and its own token ids, so equal keys mean equal prefixes
back to token 0. Nothing here touches the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

#: Tokens in a full block.
BLOCK = 256
#: Bytes in a key.
KEY_BYTES = 20
#: Key of the empty prefix, parent of every first block.
ROOT = bytes(KEY_BYTES)
#: RFC 4648's base-32 alphabet in lower case, which survives file systems that ignore case.
_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"

#: Leading tokens that `first_code` covers.
FIRST_TOKENS = 16

_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"

TokenIds = npt.NDArray[np.uint32]


def as_ids(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenIds:
    """`token_ids` as a 1-D uint32 array (a view when it already is one).

    Raises ValueError for ids below 0, at or above 2**32, or not 1-D.
    """
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.uint32:
        ids: TokenIds = token_ids.astype(np.uint32, copy=False)
    else:
        wide = np.asarray(token_ids if len(token_ids) else np.empty(0, np.uint32))
        if wide.dtype.kind not in "iu":
            raise ValueError("token ids must be integers")
        if wide.size and (wide.min() < 0 or wide.max() >= 1 << 32):
            raise ValueError("token ids must be at least 0 and below 2**32")
        ids = wide.astype(np.uint32)
    if ids.ndim != 1:
        raise ValueError("token ids must be one flat sequence")
    return ids


def pack(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers, 4 bytes each."""
    return as_ids(token_ids).astype("<u4", copy=False).tobytes()


def unpack(data: bytes) -> TokenIds:
    """The token ids in `data`; ValueError when its length is not a multiple of 4."""
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)


def child_key(parent: bytes, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Key (20 bytes) of the block that holds `token_ids` after the node `parent`."""
    return blake2b(parent + pack(token_ids), digest_size=KEY_BYTES).digest()


def chain_keys(token_ids: TokenIds) -> Iterator[bytes]:
    """Keys of the full blocks of `token_ids`, in order; a shorter tail gives none."""
    data = pack(token_ids)
    width = BLOCK * 4
    key = ROOT
    for start in range(0, len(data) - width + 1, width):
        key = blake2b(key + data[start : start + width], digest_size=KEY_BYTES).digest()
        yield key


def first_code(token_ids: TokenIds) -> str:
    """Code of a block's first tokens: one base-32 letter a token, at most 16.

    Letter i is the top five bits of a blake2b-40 of the tokens 0..i. So two blocks that share their
    first k tokens share the first k letters: from the names in a directory one sees which siblings
    can match, and how far at most, without opening any.
    """
    data = pack(token_ids[:FIRST_TOKENS])
    data = pack(token_ids[:FIRST_TOKENS])
    prefixes = (data[:end] for end in range(4, len(data) + 1, 4))
    return "".join(_LETTERS[blake2b(one, digest_size=5).digest()[0] >> 3] for one in prefixes)


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many leading tokens `a` and `b` share."""
    n = min(len(a), len(b))
    differs = np.nonzero(a[:n] != b[:n])[0]
    return int(differs[0]) if len(differs) else n
