"""Where chunks end and which positions are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.prefill.schedule import chunk_ends, kept_positions
from kvq.store.keys import BLOCK


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (5, (5,)),
        (256, (256,)),
        (263, (263,)),
        (264, (256, 264)),
        (600, (512, 600)),
    ],
)
def test_the_end_and_a_boundary_before_the_last_tokens_are_kept(tokens: int, kept: tuple) -> None:
    assert kept_positions(tokens) == kept


def test_positions_asked_for_are_kept_inside_the_prompt_only() -> None:
    assert kept_positions(300, (0, 40, 300, 999)) == (40, 256, 300)
    assert kept_positions(1000, keep_every=400) == (400, 768, 800, 1000)


def test_chunks_end_on_one_grid_wherever_they_start() -> None:
    assert chunk_ends(0, 1200, step=512) == [512, 1024, 1199, 1200]
    assert chunk_ends(768, 1200, step=512) == [1024, 1199, 1200]
    assert chunk_ends(0, 1024, step=512, last_alone=False) == [512, 1024]
    assert chunk_ends(1199, 1200, step=512) == [1200]


def test_chunks_end_where_a_state_is_kept() -> None:
    assert chunk_ends(0, 600, step=512, stops=[100, 512, 700]) == [100, 512, 599, 600]


@given(
    start=st.integers(0, 3000),
    length=st.integers(1, 3000),
    step=st.integers(1, 700),
    stops=st.lists(st.integers(0, 6000), max_size=5),
    alone=st.booleans(),
)
def test_chunks_cover_the_rest_once_and_are_no_longer_than_a_step(
    start: int, length: int, step: int, stops: list[int], alone: bool
) -> None:
    tokens = start + length
    ends = chunk_ends(start, tokens, step=step, stops=stops, last_alone=alone)
    assert ends == sorted(set(ends))
    assert ends[-1] == tokens
    assert all(0 < b - a <= step for a, b in zip([start, *ends], ends, strict=False))
    assert set(ends) >= {one for one in stops if start < one < tokens}


@given(tokens=st.integers(1, 5000))
def test_the_boundary_kept_leaves_room_for_a_rejoined_suffix(tokens: int) -> None:
    for position in kept_positions(tokens)[:-1]:
        assert position % BLOCK == 0
        assert tokens - position >= 8
