"""How often Python looks for garbage in cycles."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects after which it looks, instead of some hundreds.
_OBJECTS = 100_000

_mutex = threading.Lock()
_users = 0
_before = gc.get_threshold()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Makes it look seldom: a batch makes many objects that all stay, and few cycles.

    As it was before once the last of those on several threads is done.
    """
    global _users, _before
    with _mutex:
        if _users == 0:
            _before = gc.get_threshold()
            first, *others = _before
            # Who looks more seldom, or never (0), is left alone.
            gc.set_threshold(max(first, _OBJECTS) if first else 0, *others)
        _users += 1
    try:
        yield
    finally:
        with _mutex:
            _users -= 1
            if _users == 0:
                gc.set_threshold(*_before)
