"""What a job carries, as JSON: which tokens of which model to prefill, and what to keep of them."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvq.errors import InvalidMessage
from kvq.queue import fields
from kvq.queue.shared_ids import MAX_TOKENS, SharedPrefix
from kvq.store.names import valid_name

#: Name of the RQ queue, unless KVQ_QUEUE says otherwise.
QUEUE = "kvq"
#: The only function that a worker runs.
JOB_FUNCTION = "kvq_worker.jobs.prefill"
#: Version of a message. A worker refuses a greater one.
VERSION = 1
CODECS = ("raw", "q8", "q4", "auto")
WINDOW_RECORDS = ("kept", "all")

#: Bytes in the largest job, as JSON.
MAX_PAYLOAD = MAX_TOKENS * 4 * 4 // 3 + (4 << 20)
MAX_METADATA = 64 << 10
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_MAX_TEXT, _MAX_LIST, _MAX_SECONDS = 1024, 100_000, 1e10


@dataclass(frozen=True, kw_only=True)
class CacheToWrite:
    """One manifest that a job leaves: its name, lifetime (seconds from then on), and metadata."""

    name: str
    ttl: float | None = None
    pin: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def decode(cls, source: Any) -> CacheToWrite:
        """Raises InvalidMessage."""
        known = fields.only(source, ("name", "ttl", "pin", "metadata"), "a cache to write")
        name = fields.string(known, "name", _MAX_TEXT)
        if not valid_name(name):
            raise InvalidMessage(f"{name[:60]!r} is not a cache name")
        return cls(
            name=name,
            ttl=fields.maybe_number(known, "ttl", 0, _MAX_SECONDS),
            pin=fields.boolean(known, "pin"),
            metadata=fields.json_object(known, "metadata", MAX_METADATA),
        )

    def encode(self) -> dict[str, Any]:
        """A JSON object; what has its default value is left out."""
        given = {"ttl": self.ttl, "pin": self.pin or None, "metadata": self.metadata or None}
        return {"name": self.name, **{k: v for k, v in given.items() if v is not None}}


@dataclass(frozen=True, kw_only=True)
class PrefillMessage:
    """One job: prefill `prefix` and then `tail`, keep the blocks, write the `caches`.

    `tail` is packed token ids, 4 little-endian bytes each. A job without `caches` only leaves
    blocks for others to build on. `store` is a path as the worker sees it; None is the worker's
    own. `keep`, `window_records`, `keep_every` and `max_kl` are as in a prefill request.
    `export`, a folder as the worker sees it, is where a stock mlx-lm file of each cache goes too.
    `custom_ids` and `batch` tell people where the job comes from; they decide nothing.
    """

    model: str
    adapter: str | None = None
    store: str | None = None
    codec: str = "q8"
    prefix: SharedPrefix | None = None
    tail: bytes = b""
    caches: tuple[CacheToWrite, ...] = ()
    keep: tuple[int, ...] = ()
    window_records: str = "kept"
    keep_every: int | None = None
    max_kl: float | None = None
    export: str | None = None
    custom_ids: tuple[str, ...] = ()
    batch: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.tail) // 4 + (self.prefix.tokens if self.prefix else 0)

    def encode(self) -> dict[str, Any]:
        """The job's only argument; what has its default value is left out."""
        prefix = self.prefix
        given: dict[str, Any] = {
            "adapter": self.adapter,
            "store": self.store,
            "prefix": prefix.encode() if prefix else None,
            "caches": [one.encode() for one in self.caches] or None,
            "keep": list(self.keep) or None,
            "window_records": self.window_records if self.window_records != "kept" else None,
            "keep_every": self.keep_every,
            "max_kl": self.max_kl,
            "export": self.export,
            "custom_ids": list(self.custom_ids) or None,
            "batch": self.batch,
        }
        return {
            "version": VERSION,
            "model": self.model,
            "codec": self.codec,
            "tail": b64encode(self.tail).decode("ascii"),
            **{name: value for name, value in given.items() if value is not None},
        }

    @classmethod
    def decode(cls, source: Any) -> PrefillMessage:
        """The message in `source`, every type and bound checked. Raises InvalidMessage."""
        known = fields.only(source, ("version", *cls.__dataclass_fields__), "the message")
        if fields.integer(known, "version", 0, 1 << 30) > VERSION:
            raise InvalidMessage("the message is of a newer kvq: upgrade kvq on this worker")
        message = cls(
            model=fields.string(known, "model", _MAX_TEXT),
            adapter=fields.maybe_string(known, "adapter", _MAX_TEXT),
            store=fields.maybe_string(known, "store", 4 * _MAX_TEXT),
            codec=fields.choice(known, "codec", CODECS),
            prefix=SharedPrefix.decode(known.get("prefix")),
            tail=_decode_tail(known),
            caches=tuple(map(CacheToWrite.decode, fields.items(known, "caches", _MAX_LIST))),
            keep=fields.integers(known, "keep", _MAX_LIST, 1, MAX_TOKENS),
            window_records=fields.choice(
                {"window_records": "kept", **known}, "window_records", WINDOW_RECORDS
            ),
            keep_every=fields.maybe_integer(known, "keep_every", 1, MAX_TOKENS),
            max_kl=fields.maybe_number(known, "max_kl", 0, 1e6),
            export=fields.maybe_string(known, "export", 4 * _MAX_TEXT),
            custom_ids=fields.strings(known, "custom_ids", _MAX_LIST, _MAX_TEXT),
            batch=fields.maybe_string(known, "batch", 64),
        )
        if not 1 <= message.tokens <= MAX_TOKENS:
            raise InvalidMessage(f"{message.tokens} tokens; from 1 to {MAX_TOKENS} are accepted")
        if any(position > message.tokens for position in message.keep):
            raise InvalidMessage("a position to keep lies beyond the end of the prompt")
        return message

    def token_ids(self, fetch: Callable[[str], bytes | None]) -> bytes:
        """Packed ids of the whole prompt; `fetch` gets what Redis has under a key.

        Raises InvalidMessage when the shared prefix is gone or is another's.
        """
        if self.prefix is None:
            return self.tail
        return self.prefix.checked(fetch(self.prefix.key)) + self.tail

    def job_id(self, content: bytes) -> str:
        """Id of the job, from what it does: the same work has the same id wherever it is submitted.

        `content` identifies the token ids of the whole prompt (their chain key), so it does not
        matter how much of it is shared.
        """
        work = self.encode()
        for name in ("prefix", "tail", "custom_ids", "batch"):
            work.pop(name, None)
        digest = blake2b(content, digest_size=16, person=b"kvq-job")
        digest.update(_canonical(work).encode())
        return digest.hexdigest()


def _decode_tail(source: Any) -> bytes:
    text = source.get("tail")
    if not isinstance(text, str) or len(text) > MAX_PAYLOAD:
        raise InvalidMessage("tail is not a string of base64 within bounds")
    try:
        packed = b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidMessage(f"tail is not base64: {error}") from None
    if len(packed) % 4:
        raise InvalidMessage("tail is not whole token ids of 4 bytes")
    return packed
