"""Every error kvq raises, in one tree.

    KvqError
    ├── UsageError              the caller asked for something that cannot be (exit status 2)
    │   ├── InvalidPrompts      lines of a prompts file, each with its number and reason
    │   ├── TemplateError       a chat template refuses these messages, or there is none
    │   ├── InvalidName         a cache name that is not a safe file name
    │   ├── InvalidSetting      a KVQ_* variable or option with a bad value
    │   ├── InvalidMessage      a job in the queue that no kvq producer writes
    │   └── MissingExtra        a package that an extra brings is not installed
    ├── ModelError              a model cannot be used; the prompt will never succeed with it
    │   ├── ModelNotFound       no such folder, and no hub has it or can be reached
    │   ├── ModelNotAllowed     outside the worker's allow-list
    │   ├── UnsupportedModel    an architecture or cache class that kvq does not know
    │   ├── PromptTooLong       more tokens than the model's context
    │   └── UnknownToken        a token id that is not in the model's vocabulary
    ├── CacheError              a cache in memory cannot do what was asked
    │   ├── CannotTrim          carries the nearest position that can be had
    │   └── CannotQuantize      a layer cannot be quantized as asked
    ├── StoreError              the store on disk
    │   ├── StoreNotFound       no kvq-store.json: not a store, or not mounted
    │   ├── StoreUnavailable    full, read-only, stale or gone: worth trying again
    │   ├── UnsupportedFormat   written by a newer kvq
    │   ├── DamagedFile         a digest or a header does not hold
    │   └── CacheNotFound       no manifest of that name
    ├── FileFormatError         a stock prompt-cache file that cannot be read
    ├── QueueError              Redis or RQ
    │   ├── QueueUnavailable    cannot be reached, refused the login, or lost the connection
    │   └── BatchNotFound       no batch of that id, or its lifetime has ended
    └── Stopped                 a prefill ended early on purpose; what was finished is published

`UsageError` and `ModelError` are faults of the request: trying again cannot help.
`StoreUnavailable` and `QueueUnavailable` are faults of the machine: trying again later can.
"""

from __future__ import annotations

from collections.abc import Sequence


class KvqError(Exception):
    """Root of every error that kvq raises on purpose."""

    #: Exit status of a command that ends with this error.
    exit_status = 1


class UsageError(KvqError):
    """The caller asked for something that cannot be."""

    exit_status = 2


class InvalidPrompts(UsageError):
    """Lines of a prompts file that cannot be accepted.

    `faults` holds (line number counted from 1, reason), in the order of the file; `count` says how
    many there are in all, which is more when the collector kept only the first.
    """

    #: Faults that the message spells out; the rest are counted.
    SHOWN = 100

    def __init__(
        self, source: str, faults: Sequence[tuple[int, str]], count: int | None = None
    ) -> None:
        self.source = source
        self.faults = list(faults)
        self.count = max(count or 0, len(self.faults))
        lines = [f"  line {number}: {reason}" for number, reason in self.faults[: self.SHOWN]]
        if self.count > len(lines):
            lines.append(f"  and {self.count - len(lines)} more")
        total = "1 fault" if self.count == 1 else f"{self.count} faults"
        super().__init__("\n".join([f"{source}: {total}; nothing was submitted.", *lines]))


class TemplateError(UsageError):
    """A chat template refuses these messages, fails on them, or is missing."""


class InvalidName(UsageError):
    """A cache name that is not a safe file name."""


class InvalidSetting(UsageError):
    """A KVQ_* variable or an option has a value that cannot be used."""


class InvalidMessage(UsageError):
    """A job in the queue that no kvq producer writes: a wrong type, a value out of bounds."""


class MissingExtra(UsageError):
    """A package that one of kvq's extras brings is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"this needs the package {package!r}, which is not installed. "
            f"Install it with:  pip install 'kvq[{extra}]'"
        )


class ModelError(KvqError):
    """A model cannot be used for this prompt, now or later."""


class ModelNotFound(ModelError):
    """No such model folder, and no hub has the model or can be reached."""


class ModelNotAllowed(ModelError):
    """The model is outside this worker's allow-list (KVQ_MODELS)."""


class UnsupportedModel(ModelError):
    """An architecture or a cache class that kvq does not know how to store."""


class PromptTooLong(ModelError):
    """The prompt has more tokens than the model's context."""


class UnknownToken(ModelError):
    """A token id of the prompt is not in the model's vocabulary."""


class CacheError(KvqError):
    """A cache in memory cannot do what was asked; it is unchanged."""


class CannotTrim(CacheError):
    """The cache cannot be cut to that position.

    `nearest` is the position (tokens) nearest to the one asked for that can be had, or None when
    it is not known.
    """

    def __init__(self, message: str, nearest: int | None = None) -> None:
        self.nearest = nearest
        super().__init__(message)


class CannotQuantize(CacheError):
    """A layer cannot be quantized with the group size or bits asked for."""


class StoreError(KvqError):
    """Something about the store on disk."""


class StoreNotFound(StoreError):
    """The folder has no kvq-store.json: it is not a store, or the share is not mounted."""


class StoreUnavailable(StoreError):
    """The store is full, read-only, stale or gone. Trying again later can help."""


class UnsupportedFormat(StoreError):
    """The store or a file in it was written in a format newer than this kvq reads."""


class DamagedFile(StoreError):
    """A digest or a header does not hold. `path` is the file, `reason` what is wrong with it."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class CacheNotFound(StoreError):
    """No cache of that name is in the store."""


class FileFormatError(KvqError):
    """A prompt-cache file is not in any layout that kvq reads."""


class QueueError(KvqError):
    """Something about Redis or RQ."""


class QueueUnavailable(QueueError):
    """Redis cannot be reached, refused the login, or the connection was lost."""


class BatchNotFound(QueueError):
    """No batch of that id is known, or its lifetime has ended."""


class Stopped(KvqError):
    """A prefill ended early on purpose; every finished block is published. `reason` says why."""

    def __init__(self, reason: str, tokens: int) -> None:
        self.reason = reason
        self.tokens = tokens
        super().__init__(f"stopped after {tokens} tokens: {reason}")
