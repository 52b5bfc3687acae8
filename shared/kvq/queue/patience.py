"""Retrying by time: a Redis that restarts is waited for, a wrong password is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    TimeoutError,
)
from redis.retry import Retry

T = TypeVar("T")

_LONGEST_PAUSE = 2.0


class Patience(Retry):  # type: ignore[misc]
    """Tries again for `seconds`, pausing 50 ms, 100 ms, ... at most 2 s.

    One object serves all connections of a client, so lowering `seconds` ends waits that are
    under way: a worker that was told to stop does not sit out a long one.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(NoBackoff(), -1)
        self.seconds = seconds

    def __deepcopy__(self, memo: dict[int, Any]) -> Patience:
        return self

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """The value of `do()`; `fail` hears of each failure, the last of which is raised."""
        started, failures = time.monotonic(), 0
        while True:
            try:
                return do()
            except (ConnectionError, TimeoutError, OSError) as error:
                refused = isinstance(error, (AuthenticationError, AuthorizationError))
                if refused or (is_retryable is not None and not is_retryable(error)):
                    raise
                failures += 1
                if with_failure_count:
                    fail(error, failures)
                else:
                    fail(error)
                pause = min(_LONGEST_PAUSE, 0.025 * 2**failures)
                if time.monotonic() - started + pause > self.seconds:
                    raise
                time.sleep(pause)
