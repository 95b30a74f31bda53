"""Variants: options whose values are too many to search in full. Most are tried on the best layouts that a search has
found; one is not chosen, since it changes numbers, and what it would save is said."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from phalanx.plan.layout import Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.planner import legal
from phalanx.planner.advice import step_s
from phalanx.planner.candidates import OUTERMOST, RECOMPUTES, Candidates, divisors, of, options
from phalanx.planner.ranking import Ranking, Task
from phalanx.units import format_seconds

HANDFUL = 10
"""As many of the best ways to cut the work have their variants tried."""

WORTH = 0.005
"""Share of a step from which on a gain is worth a line."""


def around(task: Task, layouts: Candidates) -> Candidates:
    """Each of `layouts` with every other combination of `zero_group`, `recompute_every` and `tensor_overlap_chunks`
    that is legal, that [layout] leaves open, and that the search has not tried."""
    places, tried = list[int](), list[tuple[int, int, int]]()
    for place in range(len(layouts)):
        layout = layouts.layout(place)
        known = _known(task, layout)
        for values in itertools.product(*_open(task, layout)):
            group, every, chunks = values
            changed = replace(layout, zero_group=group, recompute_every=every, tensor_overlap_chunks=chunks)
            if _choice(changed) not in known:
                places.append(place)
                tried.append(values)
    groups, intervals, pieces = np.array(tried, dtype=np.int64).reshape(-1, 3).T
    found = replace(
        layouts.take(np.array(places, dtype=np.int64)),
        zero_group=groups,
        recompute_every=intervals,
        tensor_overlap_chunks=pieces,
    )
    broken = np.any(list(legal.illegal(task.model, task.job, task.cluster, found).values()), axis=0)
    return found.take(np.flatnonzero(~broken & ~legal.cannot_run(found)))


def _open(task: Task, layout: Layout) -> tuple[list[int], list[int], list[int]]:
    """Values to try of `zero_group`, `recompute_every` and `tensor_overlap_chunks`."""
    repeats = layout.recompute != "none" and layout.recompute_layers is None
    tried = {
        "zero_group": [0, *(size for size in divisors(layout.data) if 1 < size < layout.data)] if layout.zero else [0],
        "recompute_every": [1, 2, 3, 4] if repeats else [1],
        "tensor_overlap_chunks": [1, 2, 4, 8] if layout.tensor > 1 else [1],
    }
    groups, intervals, chunks = (
        [getattr(layout, key)] if key in task.given else values for key, values in tried.items()
    )
    return groups, intervals, chunks


def _known(task: Task, layout: Layout) -> set[tuple[int, ...]]:
    """Choices that the search has tried with the axis sizes of `layout`."""
    sizes = (layout.tensor, layout.context, layout.pipeline, layout.data)
    return set(options(task.model, sizes, task.cluster, task.runner.space, task.given))


def _choice(layout: Layout) -> tuple[int, ...]:
    """As `candidates.options` has it."""
    kind, order = RECOMPUTES.index(layout.recompute), OUTERMOST.index(layout.outermost)
    chosen = (layout.zero, layout.sequence_parallel, kind, layout.zero_group, layout.recompute_every)
    return (*chosen, layout.expert_group, order, layout.tensor_overlap_chunks)


def advised(task: Task, first: Plan) -> tuple[str, ...]:
    """What `first` would gain if gradients were rounded on their way, where [layout] leaves that open."""
    if first.layout.data == 1 or task.job.precision != "bf16" or "reduce" in task.given:
        return ()
    layout = replace(first.layout, reduce="bf16")
    if problems(task.model, task.job, task.cluster, layout) or engine_problems(layout):
        return ()
    rounded = Ranking(task, of([layout]), only_fitting=False).plan(0)
    gain = step_s(first) - step_s(rounded)
    if gain < WORTH * step_s(first):
        return ()
    words = f'reduce = "bf16" would save {format_seconds(gain)} ({gain / step_s(first):.1%})'
    return (f"not chosen: {words}, which rounds gradients on their way",)
