"""The machine that is examined, as checks see it: every fact from outside comes through here."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from kvq.errors import InvalidSetting, KvqError, MissingExtra
from kvq.settings import Settings

#: How long (seconds) Redis is tried, and a helper program may take.
_REDIS_SECONDS = 2.0
_PROGRAM_SECONDS = 60.0


class Role(StrEnum):
    """What a machine is for, and so which packages, rights and settings it needs."""

    PRODUCER = "producer"
    WORKER = "worker"
    OPERATOR = "operator"
    #: Resumes from a store, with neither Redis nor RQ.
    APP = "app"


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the command line says; None leaves it to the settings."""

    redis_url: str | None = None
    queue: str | None = None
    store: Path | None = None


def _platform() -> str:
    return sys.platform


@dataclass(frozen=True)
class Machine:
    """This machine in `role`. Tests put other values in the place of the real ones.

    `clock` gives seconds since 1970, `run` the output of a program or None when there is none.
    """

    role: Role
    given: Given = field(default_factory=Given)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    platform: str = field(default_factory=_platform)
    clock: Callable[[], float] = time.time
    fstab: Path = Path("/etc/fstab")

    @cached_property
    def settings(self) -> Settings:
        """The settings. Raises InvalidSetting."""
        return Settings.from_env(
            self.environment,
            redis_url=self.given.redis_url,
            queue=self.given.queue,
            store=self.given.store,
        )

    @property
    def sound(self) -> bool:
        """Whether the settings can be read, without which little can be checked."""
        try:
            return self.settings is not None
        except InvalidSetting:
            return False

    @property
    def store(self) -> Path | None:
        """Folder of the store to examine, None when none is named."""
        return self.settings.store if self.sound else None

    @cached_property
    def redis_url(self) -> str:
        """Where Redis is. Raises InvalidSetting."""
        from kvq.queue.urls import find_url

        return find_url(self.settings.redis_url, self.environment)

    @cached_property
    def redis_or_why(self) -> tuple[Any, KvqError | None]:
        """A connection that has reached the server and None, or None and why there is none."""
        try:
            from kvq.queue.connection import connect

            return connect(self.redis_url, patience=_REDIS_SECONDS), None
        except ModuleNotFoundError as error:
            return None, MissingExtra(error.name or "redis", "producer")
        except KvqError as error:
            return None, error

    @property
    def redis(self) -> Any:
        """A connection, or None."""
        return self.redis_or_why[0]

    @cached_property
    def redis_info(self) -> Mapping[str, Any] | None:
        """What INFO says, None when it may not be asked."""
        from redis.exceptions import RedisError

        try:
            return dict(self.redis.info()) if self.redis is not None else None
        except RedisError:
            return None

    def installed(self, package: str) -> str | None:
        """Version of an installed distribution, None without it."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def run(self, *command: str) -> str | None:
        """What a program writes to standard output; None when it is missing, fails or hangs."""
        program = shutil.which(command[0], path=self.environment.get("PATH"))
        if program is None:
            return None
        try:
            ran = subprocess.run(
                [program, *command[1:]],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PROGRAM_SECONDS,
                env=dict(self.environment),
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ran.stdout if ran.returncode == 0 else None

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run `code` in another interpreter, so that what crashes or hangs there does so there.

        Raises OSError, subprocess.TimeoutExpired.
        """
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_PROGRAM_SECONDS,
            env=dict(self.environment),
        )


def guess_role(has: Callable[[str], str | None]) -> Role:
    """The role that the installed packages are for; `has` gives a package's version."""
    if has("mlx-lm"):
        return Role.WORKER if has("rq") else Role.APP
    return Role.PRODUCER
