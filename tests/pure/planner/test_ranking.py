"""What goes first, and what recomputed layers cost, where bounds and replays or layers differ from what is usual."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import CLUSTER, JOB, LLAMA

from phalanx.plan.layout import Layout
from phalanx.planner.candidates import of
from phalanx.planner.engine import engine
from phalanx.planner.estimate import estimate
from phalanx.planner.ranking import Ranking, Task


def test_of_equal_machinery_the_faster_replay_goes_first_whatever_the_bounds_say() -> None:
    task = Task(model=LLAMA, job=JOB, cluster=CLUSTER, runner=engine(), given={})
    ranking = Ranking(task, of([Layout(data=8, micro_batch=size) for size in (1, 2)]))
    ranking.step_s[:] = 1.0, 1.001
    for row, seconds in enumerate((1.003, 1.002)):
        group, index = ranking.place(row)
        ranking.replayed[row] = seconds - float(group.tail_s[index])
    assert ranking.simplest(ranking.best(1)[0]) == ranking.best(1)[0] == 1


def test_only_layers_that_are_recomputed_cost_it() -> None:
    """Two of four on the first stage, one of four on the second."""
    model = replace(LLAMA, num_layers=8)
    backward = []
    for some in ({}, {"recompute": "full"}, {"recompute": "full", "recompute_layers": (2, 1)}):
        (group,) = estimate(model, JOB, CLUSTER, engine(), of([Layout(pipeline=2, stage_layers=(4, 4), **some)]))
        backward.append(group.times.backward_s[0])
    none, whole, part = backward
    assert part - none == pytest.approx((whole - none) * [2 / 4, 1 / 4])
