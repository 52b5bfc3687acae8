"""Looking for garbage seldom, and then as before."""

from __future__ import annotations

import gc

from kvq_producer.submit.garbage import seldom_collected


def test_it_is_as_before_once_the_last_of_several_is_done() -> None:
    before = gc.get_threshold()
    first, second = seldom_collected(), seldom_collected()
    first.__enter__()
    assert gc.get_threshold()[0] >= 100_000
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] >= 100_000
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_who_never_looks_is_left_alone() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with seldom_collected():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
