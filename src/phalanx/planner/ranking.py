"""Ranking: many legal layouts with their memory and time, and the questions that a search asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.planner import describe, memory, timeline
from phalanx.planner.candidates import ARRAYS, OUTERMOST, Array, Candidates, of
from phalanx.planner.engine import Engine
from phalanx.planner.estimate import Group, footprints, price
from phalanx.planner.machinery import NEAR, machinery
from phalanx.planner.shift import fitting
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

NEAREST = 2000
"""Of layouts that do not fit, as many are looked at more closely for the smallest."""

TOO_LARGE = "does not fit into memory"

MOST_SHIFTED = 8
"""Layouts that are tried with layers moved between stages, where none fits otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why `count` layouts are out: the reason, one of them with its numbers, and the least change that helps."""

    reason: str
    count: int
    example: Layout
    detail: str
    instead: str


FINE = ("schedule", "virtual_stages", "outermost", "zero_group", "recompute_every", "tensor_overlap_chunks")
WAY = tuple(name for name in ARRAYS if name not in FINE)
"""What makes two layouts different ways to cut the work. Those that differ in FINE options alone are one way, and there
may be hundreds of them, many as fast as each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Other fine options with which one way to cut the work fits too: seconds of a step by the bound, so at least;
    bytes of the fullest rank."""

    schedule: str
    virtual_stages: int
    outermost: str
    zero_group: int
    recompute_every: int
    tensor_overlap_chunks: int
    least_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is searched for: the three specs, the engine that shall run it, and the layout keys that stay."""

    model: ModelSpec
    job: JobSpec
    cluster: ClusterSpec
    runner: Engine
    given: Mapping[str, Any]


class Ranking:
    """Legal layouts and their cost: `peak` bytes of the fullest rank (at least, where model states alone are too much),
    whether that `fits`, and, for those that do, `step_s` by the bound; `order` has them in rising order of that, among
    equals the smaller first."""

    def __init__(self, task: Task, layouts: Candidates, *, only_fitting: bool = True) -> None:
        self.task, self.layouts, self.groups = task, layouts.take(np.arange(0)), list[Group]()
        self.limit = task.cluster.device.memory_bytes if only_fitting else np.inf
        self.group_of, self.index_of = np.zeros(0, dtype=int), np.zeros(0, dtype=int)
        self.exact, self.peak, self.step_s = np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0)
        self.replayed: dict[int, float] = {}
        self.add(layouts)

    def add(self, layouts: Candidates) -> None:
        """Price more layouts, which come after those that are here. They must name the same schedules."""
        task, limit, before = self.task, self.limit, len(self.layouts)
        specs = (task.model, task.job, task.cluster, task.runner)
        least = memory.least(task.model, task.runner, task.job.precision, layouts)
        self.layouts, self.peak = self.layouts.joined(layouts), np.append(self.peak, least)
        self.group_of = np.append(self.group_of, np.zeros(len(layouts), dtype=int))
        self.index_of = np.append(self.index_of, np.zeros(len(layouts), dtype=int))
        self.exact = np.append(self.exact, np.zeros(len(layouts), dtype=bool))
        self.step_s = np.append(self.step_s, np.full(len(layouts), np.inf))
        possible = before + np.flatnonzero(least <= limit)
        for footprint in footprints(*specs, self.layouts.take(possible)):
            footprint = replace(footprint, rows=possible[footprint.rows])
            self.peak[footprint.rows] = footprint.memory_bytes.max(1)
            self.exact[footprint.rows] = True
            keep = self.peak[footprint.rows] <= limit
            if keep.any():
                self._keep(price(*specs, footprint.take(np.flatnonzero(keep))))
        self.fits: Array = self.peak <= task.cluster.device.memory_bytes
        rows = np.flatnonzero(self.fits)
        self.order: Array = rows[np.lexsort((self.peak[rows], self.step_s[rows]))]

    def _keep(self, group: Group) -> None:
        self.group_of[group.rows] = len(self.groups)
        self.index_of[group.rows] = np.arange(len(group.rows))
        self.step_s[group.rows] = group.step_s
        self.groups.append(group)

    def place(self, row: int) -> tuple[Group, int]:
        """Which group holds candidate `row`, which must have been priced, and where in it."""
        return self.groups[self.group_of[row]], int(self.index_of[row])

    def bound_s(self, row: int) -> float:
        """The bound on the pipeline's time of candidate `row`."""
        group, index = self.place(row)
        return float(group.pipeline_s[index])

    def replayed_s(self, row: int) -> float:
        """Seconds of the pipeline from the layout's own schedule."""
        if row not in self.replayed:
            layout, (group, index) = self.layouts.layout(row), self.place(row)
            shape = (layout.pipeline, layout.virtual_stages, layout.num_micro_batches(self.task.job.global_batch))
            one = layout.pipeline == 1
            alone = self.bound_s(row) if one else timeline.replay_s(layout.schedule, group.times, index, *shape)
            self.replayed[row] = alone
        return self.replayed[row]

    def replayed_step_s(self, row: int) -> float:
        """Seconds of a step, the pipeline replayed; rounded to what may differ by the order of sums."""
        group, index = self.place(row)
        return round(self.task.runner.factor * (self.replayed_s(row) + float(group.tail_s[index])), 9)

    def plan(self, row: int, pipeline_s: float | None = None) -> Plan:
        """Candidate `row` with its Prediction; replayed unless its pipeline's seconds are given."""
        task, (group, index) = self.task, self.place(row)
        seconds = self.replayed_s(row) if pipeline_s is None else pipeline_s
        prediction = describe.prediction(task.job, task.runner, group, index, seconds)
        layout = self.layouts.layout(row)
        return Plan(model=task.model, cluster=task.cluster, job=task.job, layout=layout, prediction=prediction)

    def best(self, top: int, among: Array | None = None) -> list[int]:
        """The `top` fastest ways to cut the work that fit, of rows `among`, each at its best, by replayed
        time; among equals the smaller first.

        A layout whose bound is above the slowest of them, or above another of its way, cannot be among them.
        """
        order = self.order
        if among is not None:
            wanted = np.zeros(len(self.fits), dtype=bool)
            wanted[among] = True
            order = order[wanted[order]]
        columns = [getattr(self.layouts, name) for name in WAY]
        best: dict[tuple[int, ...], tuple[float, float, int]] = {}
        limit = np.inf
        for row in order.tolist():
            if self.step_s[row] > limit:
                break
            way = tuple(int(column[row]) for column in columns)
            known = best.get(way)
            if known and self.step_s[row] > known[0]:
                continue
            this = (self.replayed_step_s(row), float(self.peak[row]), row)
            best[way] = min(this, known) if known else this
            if len(best) >= top:
                limit = sorted(best.values())[top - 1][0]
        return [row for _, _, row in sorted(best.values())[:top]]

    def alike(self, row: int) -> tuple[Alike, ...]:
        """Others that cut the work as candidate `row` does, in rising order of their bound."""
        rows, layouts = self.order, self.layouts
        for name in WAY:
            column = getattr(layouts, name)
            rows = rows[column[rows] == column[row]]
        return tuple(
            Alike(
                schedule=layouts.schedules[layouts.schedule[other]],
                virtual_stages=int(layouts.virtual_stages[other]),
                outermost=OUTERMOST[layouts.outermost[other]],
                zero_group=int(layouts.zero_group[other]),
                recompute_every=int(layouts.recompute_every[other]),
                tensor_overlap_chunks=int(layouts.tensor_overlap_chunks[other]),
                least_s=float(self.step_s[other]),
                memory_bytes=float(self.peak[other]),
            )
            for other in rows.tolist()
            if other != row
        )

    def simplest(self, fastest: int) -> int:
        """The layout that goes first: of those that take at most NEAR longer than the `fastest`, the fastest of those
        that need the least machinery. Such are replayed in this order, until one is found and no faster one is left."""
        limit = (1.0 + NEAR) * self.replayed_step_s(fastest)
        rows = np.flatnonzero(self.fits & (self.step_s <= limit))
        needed = machinery(self.layouts.take(rows))
        found: tuple[int, float, float, int] | None = None
        for place in np.lexsort((self.peak[rows], self.step_s[rows], needed)).tolist():
            row, least = int(rows[place]), (int(needed[place]), float(self.step_s[rows[place]]))
            if found and least > found[:2]:
                break
            step_s = self.replayed_step_s(row)
            if step_s <= limit:
                this = (least[0], step_s, float(self.peak[row]), row)
                found = min(found, this) if found else this
        assert found is not None, "the fastest is within the limit"
        return found[-1]

    def front(self, fastest: int) -> list[int]:
        """Layouts that fit and, by the bound, are slower than the `fastest`, in rising order of time, each smaller than
        it and all before."""
        slower = self.order[self.step_s[self.order] >= self.replayed_step_s(fastest)]
        order = np.concatenate(([fastest], slower))
        least = np.minimum.accumulate(self.peak[order])
        kept: list[int] = order[np.append(True, least[1:] < least[:-1])].tolist()
        return kept

    def shifted(self) -> Plan | None:
        """Where nothing fits: the smallest layout with stages that does once layers are moved between them."""
        task = self.task
        if self.layouts.stage_layers is not None or task.runner.balance != "cost":
            return None
        rows = np.flatnonzero(self.layouts.pipeline > 1)
        for row in rows[np.argsort(self.peak[rows], kind="stable")][:MOST_SHIFTED].tolist():
            found = fitting(self._alone(self.layouts.layout(row)), task.cluster.device.memory_bytes, self._alone)
            if found:
                return found
        return None

    def _alone(self, layout: Layout) -> Plan:
        return Ranking(self.task, of([layout]), only_fitting=False).plan(0)

    def memory_sum(self, row: int) -> str:
        """What fills the fullest rank of candidate `row`."""
        task, alone = self.task, self.layouts.take(np.array([row]))
        (footprint,) = footprints(task.model, task.job, task.cluster, task.runner, alone)
        return describe.memory_sum(footprint, 0, task.cluster.device.memory_bytes)

    def smallest(self, rows: Array) -> tuple[int, float]:
        """Of candidates `rows`, the one whose fullest rank needs least, and how many bytes: activations included, also
        where states alone are too much. Of the latter, those are looked at whose least is least."""
        task, known = self.task, rows[self.exact[rows]]
        bar = self.peak[known].min(initial=np.inf)
        others = rows[~self.exact[rows] & (self.peak[rows] < bar)]
        others = others[np.argsort(self.peak[others], kind="stable")[:NEAREST]]
        near = np.concatenate((known[np.argsort(self.peak[known], kind="stable")[:1]], others))
        peak = np.empty(len(near))
        for footprint in footprints(task.model, task.job, task.cluster, task.runner, self.layouts.take(near)):
            peak[footprint.rows] = footprint.memory_bytes.max(1)
        return int(near[np.argmin(peak)]), float(peak.min())

    def too_large(self) -> Rejection:
        """Those that do not fit: the smallest of them, its sum, and the nearest layout that does."""
        over = np.flatnonzero(~self.fits)
        row, _ = self.smallest(over)
        instead = ""
        if self.fits.any():
            instead = describe.nearest_change(self.layouts, row, np.flatnonzero(self.fits), self.step_s)
        return Rejection(
            reason=TOO_LARGE,
            count=len(over),
            example=self.layouts.layout(row),
            detail=self.memory_sum(row),
            instead=instead,
        )
