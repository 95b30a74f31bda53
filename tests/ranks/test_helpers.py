"""The helpers themselves: a test that cannot fail proves nothing."""

from __future__ import annotations

import os
import time

import pytest
from helpers import RankFailed, run_group, run_ranks, run_worlds
from tiny import tiny_model

from phalanx.errors import CommError
from phalanx.plan.layout import Layout


def test_results_come_in_rank_order() -> None:
    assert run_ranks(3, lambda rank, factor: rank * factor, 5) == [0, 5, 10]


def test_the_first_error_ends_all_and_is_told() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("no")
        time.sleep(60)

    began_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1: raised[\s\S]*ValueError: no") as failed:
        run_ranks(3, fail)
    assert isinstance(failed.value.cause, ValueError)
    assert time.monotonic() - began_s < 50


def test_a_cause_is_told_before_its_consequences() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            time.sleep(0.5)
            raise KeyError("cause")
        raise CommError("consequence")

    with pytest.raises(RankFailed, match="cause") as failed:
        run_ranks(2, fail)
    assert failed.value.rank == 1


def test_silence_and_delay_are_failures() -> None:
    with pytest.raises(RankFailed, match="rank 0: died without a word"):
        run_ranks(2, lambda rank: os._exit(0) if rank == 0 else None)
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] had not ended after 0.5 s"):
        run_ranks(2, lambda rank: time.sleep(60), timeout=0.5)
    assert run_ranks(2, lambda rank: os._exit(0) if rank == 0 else 7, mortal=[0]) == [None, 7]


def test_worlds_and_groups() -> None:
    coords = run_worlds(Layout(tensor=2, data=2), lambda world: world.coord, model=tiny_model())
    assert coords == list(Layout(tensor=2, data=2).coords())
    assert run_group(3, lambda comm: (comm.index, comm.size)) == [(0, 3), (1, 3), (2, 3)]
