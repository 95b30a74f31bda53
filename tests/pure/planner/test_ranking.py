"""What goes first, and what recomputed layers cost, where bounds and replays or layers differ from what is usual."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import CLUSTER, JOB, LLAMA

from phalanx.plan.layout import Layout
from phalanx.planner import legal
from phalanx.planner.candidates import enumerate_all, of
from phalanx.planner.engine import engine
from phalanx.planner.estimate import estimate
from phalanx.planner.machinery import NEAR
from phalanx.planner.ranking import Ranking, Task
from phalanx.spec.model import ModelSpec


def ranked(layouts: list[Layout], bounds_s: list[float], replayed_s: list[float]) -> Ranking:
    """Layouts whose steps take what is said, by the bound and replayed."""
    task = Task(model=LLAMA, job=JOB, cluster=CLUSTER, runner=engine(), given={})
    ranking = Ranking(task, of(layouts))
    ranking.step_s[:] = bounds_s
    for row, seconds in enumerate(replayed_s):
        group, index = ranking.place(row)
        ranking.replayed[row] = seconds - float(group.tail_s[index])
    return ranking


def test_of_equal_machinery_the_faster_replay_goes_first_whatever_the_bounds_say() -> None:
    ranking = ranked([Layout(data=8, micro_batch=size) for size in (1, 2)], [1.0, 1.001], [1.003, 1.002])
    assert ranking.simplest(ranking.best(1)[0]) == ranking.best(1)[0] == 1


@pytest.mark.parametrize(("slower", "first"), [(0.9 * NEAR, 0), (1.1 * NEAR, 1)])
def test_less_machinery_goes_first_only_where_it_is_as_good_as_the_fastest(slower: float, first: int) -> None:
    ranking = ranked([Layout(data=8), Layout(tensor=2, data=4)], [1.0, 1.0], [1.0 + slower, 1.0])
    assert ranking.best(1) == [1]
    assert ranking.simplest(1) == first


def test_only_layers_that_are_recomputed_cost_it() -> None:
    """Two of four on the first stage, one of four on the second."""
    model = replace(LLAMA, num_layers=8)
    backward = []
    for some in ({}, {"recompute": "full"}, {"recompute": "full", "recompute_layers": (2, 1)}):
        (group,) = estimate(model, JOB, CLUSTER, engine(), of([Layout(pipeline=2, stage_layers=(4, 4), **some)]))
        backward.append(group.times.backward_s[0])
    none, whole, part = backward
    assert part - none == pytest.approx((whole - none) * [2 / 4, 1 / 4])


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("phalanx", LLAMA),
        ("megatron-core-2024", replace(LLAMA, num_experts=6, experts_per_token=2)),
    ],
)
def test_layouts_cost_alone_what_they_cost_among_others(name: str, model: ModelSpec) -> None:
    """Prices of blocks are made once for all layouts that share them."""
    cluster, runner = replace(CLUSTER, num_nodes=2, devices_per_node=6), engine(name)
    task = Task(model=model, job=JOB, cluster=cluster, runner=runner, given={})
    every, _ = enumerate_all(model, JOB, cluster, runner.space, {})
    broken = np.any(list(legal.illegal(model, JOB, cluster, every).values()), axis=0)
    every = every.take(np.flatnonzero(~broken))
    together = Ranking(task, every)
    assert set(np.unique(every.recompute_every)) == set(runner.space.recompute_every)
    for row in np.random.default_rng(1).choice(len(every), 60, replace=False).tolist():
        alone = Ranking(task, of([every.layout(row)]))
        assert together.step_s[row] == pytest.approx(float(alone.step_s[0]), rel=1e-9), every.layout(row)
        assert together.peak[row] == alone.peak[0]
