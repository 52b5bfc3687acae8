"""How often Python looks for garbage in cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects after which it looks, instead of some hundreds.
_OBJECTS = 100_000


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Makes it look seldom: a batch makes many objects that all stay, and few cycles."""
    first, *others = gc.get_threshold()
    # A caller that looks more seldom, or never (0), is left alone.
    gc.set_threshold(max(first, _OBJECTS) if first else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
