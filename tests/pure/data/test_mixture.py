"""Mixtures: proportions within the stated bound at every moment, whoever asks for which part of the run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.mixture import choose, shares


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0], (1,)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([2.0, 6.0], (1, 3)),
        ([1e-3, 1.0], (1, 1000)),
        ([0.1] * 3, (1, 1, 1)),
    ],
)
def test_weights_are_taken_as_they_are_written(weights: list[float], expected: tuple[int, ...]):
    assert shares(weights) == expected


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=6), count=st.integers(1, 400))
def test_every_beginning_of_a_run_has_its_proportions(parts: list[int], count: int):
    sets, earlier = choose(0, count, parts)
    for index, part in enumerate(parts):
        mine = sets == index
        assert earlier[mine].tolist() == list(range(mine.sum())), "each set is read in order, nothing left out"
        due = np.arange(1, count + 1) * part / sum(parts)
        assert np.abs(np.cumsum(mine) - due).max() < max(1, len(parts) - 1) + 1e-9
    period = sum(parts)
    if count >= period:
        assert np.bincount(sets[:period], minlength=len(parts)).tolist() == parts


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.integers(1, 10**12), min_size=2, max_size=5), first=st.integers(0, 10**15))
def test_any_part_of_a_run_is_found_by_arithmetic(parts: list[int], first: int):
    sets, earlier = choose(first, 8, parts)
    again = [choose(first + number, 1, parts) for number in range(8)]
    assert sets.tolist() == [int(found[0][0]) for found in again]
    assert earlier.tolist() == [int(found[1][0]) for found in again]
    for index, part in enumerate(parts):
        taken = earlier[sets == index]
        if len(taken):
            assert abs(int(taken[0]) - first * part // sum(parts)) <= len(parts) + 8
