"""Every KVQ_* variable: what it sets, its default, and what it accepts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from kvq import parsing
from kvq.errors import InvalidSetting

_DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one process, read once at its start. Durations are seconds, sizes bytes.

    What each is for: `VARIABLES`. `repr` masks passwords.
    """

    redis_url: str | None = None
    redis_ca: Path | None = None
    redis_patience: float = 300.0
    queue: str = "kvq"
    batch_lifetime: float = 7 * _DAY
    state: Path
    cache_dir: Path | None = None
    store: Path | None = None
    export: Path | None = None
    min_free: int = 256 << 20
    models: tuple[str, ...] = ("*",)
    model_memory: int | None = None
    cache_memory: int = 2 << 30
    step: int = 512
    max_tokens: int = 1 << 20
    job_timeout: float = 7200.0
    grace: float = 300.0
    lease: float = 8.0
    heartbeat: float = 2.0
    log_format: str = "text"
    parent: int | None = None

    def __post_init__(self) -> None:
        if self.heartbeat * 3 > self.lease:
            raise InvalidSetting(
                f"KVQ_HEARTBEAT={self.heartbeat:g} is too long for KVQ_LEASE={self.lease:g}: "
                "a lease must outlast three heartbeats"
            )

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Settings from `environment` (default: this process's); `given` values win over it.

        An empty variable counts as unset, and so does None in `given`. Raises InvalidSetting,
        naming the variable, its value and what is accepted.
        """
        env = os.environ if environment is None else environment
        values: dict[str, Any] = {"state": default_state(env)}
        for one in VARIABLES:
            raw = env.get(one.variable, "")
            if raw.strip():
                try:
                    values[one.field] = one.parse(raw)
                except ValueError as error:
                    raise InvalidSetting(f"{one.variable}: {error}") from error
        return cls(**values | {name: value for name, value in given.items() if value is not None})

    def __repr__(self) -> str:
        shown = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.redis_url:
            shown["redis_url"] = parsing.masked_url(self.redis_url)
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class Variable(NamedTuple):
    """One KVQ_* variable and the field of `Settings` that it fills."""

    variable: str
    field: str
    parse: Callable[[str], Any]
    default: str
    doc: str


_patience, _lifetime = parsing.seconds(0, _DAY), parsing.seconds(60, 365 * _DAY)
_timeout, _grace = parsing.seconds(1, 30 * _DAY), parsing.seconds(1, _DAY)
_lease, _heartbeat = parsing.seconds(3, 3600), parsing.seconds(0.1, 1200)
_size, _step, _tokens = parsing.size(0), parsing.integer(16, 65536), parsing.integer(1, 1 << 24)

# fmt: off
VARIABLES = (
    Variable("KVQ_REDIS_URL", "redis_url", parsing.text, "redis://localhost:6379/0",
             "Redis or Valkey: redis://, rediss://, unix:// or redis+sentinel://; when unset, "
             "RQ_REDIS_URL and REDIS_URL are asked"),
    Variable("KVQ_REDIS_CA", "redis_ca", parsing.path, "the system's authorities",
             "file of the certificate authority that rediss:// servers are checked against"),
    Variable("KVQ_REDIS_PATIENCE", "redis_patience", _patience, "5m",
             "how long a worker, and a waiting command, try to reach a Redis that is gone"),
    Variable("KVQ_QUEUE", "queue", parsing.queue, "kvq", "name of the RQ queue"),
    Variable("KVQ_BATCH_LIFETIME", "batch_lifetime", _lifetime, "7d",
             "how long a batch, its results and shared token ids are remembered in Redis"),
    Variable("KVQ_STATE", "state", parsing.path, "the user's state folder",
             "private folder of `kvq run`: its server's data and its workers' logs"),
    Variable("KVQ_CACHE_DIR", "cache_dir", parsing.path, "the user's cache folder",
             "where digests of model files are remembered"),
    Variable("KVQ_STORE", "store", parsing.path, "what each job names",
             "the store; a worker that has it set writes to no other"),
    Variable("KVQ_EXPORT", "export", parsing.path, "none",
             "folder below which a worker may leave stock files for mlx-lm (`submit --export`)"),
    Variable("KVQ_MIN_FREE", "min_free", _size, "256MiB",
             "free space in the store below which a worker takes no jobs"),
    Variable("KVQ_MODELS", "models", parsing.globs, "*",
             "models that a worker may load: names, folders and globs of them, comma-separated"),
    Variable("KVQ_MODEL_MEMORY", "model_memory", _size, "60 % of the device's",
             "memory that models kept loaded may take together"),
    Variable("KVQ_CACHE_MEMORY", "cache_memory", _size, "2GiB",
             "memory that MLX may keep for reuse between chunks"),
    Variable("KVQ_STEP", "step", _step, "512", "tokens in a prefill chunk"),
    Variable("KVQ_MAX_TOKENS", "max_tokens", _tokens, "1048576",
             "tokens in the longest prompt that a worker accepts"),
    Variable("KVQ_JOB_TIMEOUT", "job_timeout", _timeout, "2h",
             "longest run of one job; what is finished by then stays stored"),
    Variable("KVQ_GRACE", "grace", _grace, "5m",
             "how far past its timeout a job may hang in one evaluation before its worker ends"),
    Variable("KVQ_LEASE", "lease", _lease, "8s",
             "silence after which a worker counts as dead and its job runs elsewhere"),
    Variable("KVQ_HEARTBEAT", "heartbeat", _heartbeat, "2s",
             "pause between a worker's signs of life, at most a third of KVQ_LEASE"),
    Variable("KVQ_LOG_FORMAT", "log_format", parsing.choice("text", "json"), "text",
             "how a worker's log is written: `text`, or `json`, an object a line"),
    Variable("KVQ_PARENT", "parent", parsing.integer(1, 1 << 31), "none",
             "process whose end is the worker's too; `kvq run` sets it"),
)
# fmt: on


def default_state(environment: Mapping[str, str]) -> Path:
    """The user's folder for private state, by this system's convention."""
    home = Path(environment.get("HOME") or Path.home())
    if os.uname().sysname == "Darwin":
        return home / "Library" / "Application Support" / "kvq"
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else home / ".local" / "state") / "kvq"


def table() -> str:
    """Every variable as a Markdown table."""
    head = "| variable | what it sets | default |\n|---|---|---|\n"
    return head + "".join(f"| `{v.variable}` | {v.doc} | {v.default} |\n" for v in VARIABLES)
