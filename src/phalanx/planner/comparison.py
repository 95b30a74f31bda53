"""Comparison: what an expert would try by hand beside the first plan. The other shapes (data alone, a pipeline, a
tensor axis …) and every tensor size, each at its best, or why it is out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from phalanx.plan.layout import Layout
from phalanx.plan.legality import problems
from phalanx.plan.plan import Plan
from phalanx.planner.advice import Compared, difference, step_s
from phalanx.planner.candidates import Array, Candidates
from phalanx.planner.ranking import Ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Beside the first plan, the best of each shape by its name, the simpler first, and of each tensor size."""

    shapes: Mapping[str, Compared]
    scan: Mapping[int, Compared]


def compare(ranking: Ranking, first: int, winner: Plan, tensors: Iterable[int]) -> Comparison:
    """`winner` is candidate `first` of `ranking`, `tensors` are the sizes that were looked at, legal or not. Shapes
    that no legal layout has are left out."""
    shapes = {name: np.flatnonzero(mask) for name, mask in _shapes(ranking.layouts).items()}
    sizes = {tensor: np.flatnonzero(ranking.layouts.tensor == tensor) for tensor in tensors}
    return Comparison(
        shapes={name: _best(ranking, rows, first, winner) for name, rows in shapes.items() if len(rows)},
        scan={
            tensor: _best(ranking, rows, first, winner) if len(rows) else _illegal(winner, tensor)
            for tensor, rows in sizes.items()
        },
    )


def _shapes(layouts: Candidates) -> dict[str, Array]:
    tensor, pipeline, whole = layouts.tensor > 1, layouts.pipeline > 1, layouts.context == 1
    alone, cut = whole & ~tensor & ~pipeline, layouts.zero == 3
    return {
        "data alone": alone & ~cut,
        "data alone, ZeRO 3": alone & cut,
        "pipeline and data": whole & ~tensor & pipeline,
        "tensor and data": whole & tensor & ~pipeline,
        "all three": whole & tensor & pipeline,
        "context": ~whole,
    }


def _best(ranking: Ranking, rows: Array, first: int, winner: Plan) -> Compared:
    """The best of candidates `rows`, or what fills the fullest rank of the smallest."""
    fastest = ranking.best(1, rows)
    if not fastest:
        return Compared(plan=None, slower=np.inf, because=ranking.memory_sum(ranking.smallest(rows)[0]))
    best = winner if first in rows else ranking.plan(fastest[0])
    return Compared(plan=best, slower=step_s(best) / step_s(winner) - 1.0, because=difference(best, winner))


def _illegal(winner: Plan, tensor: int) -> Compared:
    """Why no layout has a tensor axis of this size."""
    data = max(1, winner.cluster.num_devices // tensor)
    found = problems(winner.model, winner.job, winner.cluster, Layout(tensor=tensor, data=data))
    about = [problem.what for problem in found if problem.where == "layout.tensor"]
    return Compared(plan=None, slower=np.inf, because=about[0] if about else "no legal layout has it")
