"""Variants: options that the search leaves as they are, tried on the layout that goes first. What helps is advice,
and not chosen: it was not tried on other layouts, and one of them changes numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.planner.advice import step_s
from phalanx.planner.candidates import ARRAYS, divisors, of
from phalanx.planner.ranking import Ranking, Task
from phalanx.units import format_seconds

WORTH = 0.005
"""Share of a step from which on a gain is worth a line."""

ROUNDS = ", which rounds gradients on their way"


def advised(task: Task, first: Plan) -> tuple[str, ...]:
    """For each option that [layout] leaves open, the value that would make `first` faster, and by how much."""
    found = []
    for key, values in _open(task, first).items():
        best = min(_changed(task, first, key, values), key=step_s, default=first)
        gain = step_s(first) - step_s(best)
        if gain >= WORTH * step_s(first):
            value, share = getattr(best.layout, key), gain / step_s(first)
            shown, note = (f'"{value}"', ROUNDS) if key == "reduce" else (value, "")
            found.append(f"not tried on others: {key} = {shown} would save {format_seconds(gain)} ({share:.1%}){note}")
    return tuple(found)


def _open(task: Task, first: Plan) -> dict[str, list[Any]]:
    """Values to try, by key."""
    layout = first.layout
    repeats = layout.recompute != "none" and layout.recompute_layers is None
    tried: dict[str, list[Any]] = {
        "tensor_overlap_chunks": [2, 4, 8] if layout.tensor > 1 else [],
        "reduce": ["bf16"] if layout.data > 1 and task.job.precision == "bf16" else [],
        "zero_group": [size for size in divisors(layout.data) if 1 < size < layout.data] if layout.zero else [],
        "recompute_every": [2, 3, 4] if repeats else [],
    }
    return {key: values for key, values in tried.items() if key not in task.given}


def _changed(task: Task, first: Plan, key: str, values: list[Any]) -> list[Plan]:
    """`first` with each other value of one key with which it can run and fits."""
    layouts = [replace(first.layout, **{key: value}) for value in values]
    layouts = [x for x in layouts if not problems(task.model, task.job, task.cluster, x) and not engine_problems(x)]
    # What arrays hold may differ within one Candidates.
    batches = [layouts] if key in ARRAYS and layouts else [[layout] for layout in layouts]
    found = []
    for batch in batches:
        priced = Ranking(task, of(batch))
        found += [priced.plan(row) for row in range(len(batch)) if priced.fits[row]]
    return found
