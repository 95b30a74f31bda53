"""Search: every legal layout, priced, ranked; and why the others lost.

Exact: all layouts are priced by the bound, and replayed in its order until no unplayed one can still be among the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.errors import LayoutError, Problem
from phalanx.plan.layout import AXES, Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.planner import advice, describe, legal, memory, timeline
from phalanx.planner.advice import Scanned, reasons
from phalanx.planner.candidates import Array, Candidates, enumerate_all, of
from phalanx.planner.engine import OURS, Engine, engine, profiles
from phalanx.planner.estimate import Group, footprints, price
from phalanx.planner.shift import fitting
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.units import format_bytes

NEAREST = 2000
"""Of layouts that do not fit, as many are looked at more closely for the smallest."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """`plans` best first, each with its Prediction; `reasons` for the first, in words; the `scan` over tensor sizes;
    the `front` of layouts that no other beats in both time and memory; `rejected` by reason; how many layouts were
    looked at, how many of them fit, and how many had their schedule replayed."""

    plans: tuple[Plan, ...]
    reasons: tuple[str, ...]
    scan: tuple[Scanned, ...]
    front: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    num_layouts: int
    num_fitting: int
    num_replayed: int
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is searched for: the three specs, the engine that shall run it, and the layout keys that stay."""

    model: ModelSpec
    job: JobSpec
    cluster: ClusterSpec
    runner: Engine
    given: Mapping[str, Any]


def search(
    model: ModelSpec,
    job: JobSpec,
    cluster: ClusterSpec,
    given: Mapping[str, Any] | None = None,
    *,
    engine_name: str = OURS,
    top: int = 10,
) -> Search:
    """Rank all layouts of all devices; keys of Layout in `given` keep their value.

    Raises LayoutError, with the sum of the closest layout and the least change that helps, when none can run.
    """
    task = Task(model=model, job=job, cluster=cluster, runner=engine(engine_name), given=dict(given or {}))
    if model.num_experts and engine_name == OURS:
        others = ", ".join(name for name in profiles() if name != OURS)
        what = f"{model.name} has experts, which the trainer does not run"
        raise LayoutError(what, instead=f"--engine, one of {others}")
    everything, layouts, rejected = _legal(task)
    if not len(layouts):
        raise LayoutError(_nothing_legal(task, rejected))
    priced = _Priced(task, layouts)
    if not priced.fits.all():
        rejected.append(priced.too_large())
    shifted = None if priced.fits.any() else priced.shifted()
    if shifted:
        layouts = of([shifted.layout])
        priced = _Priced(task, layouts)
    if not priced.fits.any():
        what = f"no layout fits into memory; of the smallest, {rejected[-1].detail}"
        raise LayoutError(Problem(what=what, where=cluster.name, instead=_larger(task, priced)))
    best, num_replayed = priced.best(top)
    plans = tuple(priced.plan(row, pipeline_s) for row, pipeline_s in best)
    scan = tuple(priced.scan(np.unique(everything.tensor).tolist(), plans[0]))
    return Search(
        plans=plans,
        reasons=(
            *reasons(plans, scan, task.runner.tie, given=_axes_given(task)),
            *((f"stages of equal work do not fit: {_counts(plans[0])} layers do",) if shifted else ()),
        ),
        scan=scan,
        front=(plans[0], *(priced.plan(row, priced.bound_s(row)) for row in priced.front(best[0]))),
        rejected=tuple(rejected),
        num_layouts=len(everything),
        num_fitting=int(priced.fits.sum()),
        num_replayed=num_replayed,
        engine=task.runner.name,
    )


def glance(
    model: ModelSpec, job: JobSpec, cluster: ClusterSpec, given: Mapping[str, Any], *, engine_name: str = OURS
) -> Plan | None:
    """A first answer, before `search` has looked at thousands of devices: the best layout under plain 1F1B, None where
    no such layout is legal and fits."""
    if model.num_experts and engine_name == OURS:
        return None  # search says why
    runner = engine(engine_name)
    plain = replace(runner.space, schedules=("1f1b",), recompute_every=(1,), zero_in_node=False)
    task = Task(model=model, job=job, cluster=cluster, runner=replace(runner, space=plain), given=dict(given))
    _, layouts, _ = _legal(task)
    priced = _Priced(task, layouts) if len(layouts) else None
    return priced.plan(priced.best(1)[0][0][0]) if priced and priced.fits.any() else None


def predict(model: ModelSpec, job: JobSpec, cluster: ClusterSpec, layout: Layout, *, engine_name: str = OURS) -> Plan:
    """The Plan of one layout as `search` would price it, fitting or not. Raises LayoutError if it is illegal."""
    found = problems(model, job, cluster, layout)
    if found:
        raise LayoutError(found)
    task = Task(model=model, job=job, cluster=cluster, runner=engine(engine_name), given={})
    return _Priced(task, of([layout]), only_fitting=False).plan(0)


class _Priced:
    """Legal layouts and their cost: `peak` bytes of the fullest rank (at least, where model states alone are too much),
    whether that `fits`, and, for those that do, `step_s` by the bound."""

    def __init__(self, task: Task, layouts: Candidates, *, only_fitting: bool = True) -> None:
        self.task, self.layouts, self.groups = task, layouts, list[Group]()
        self.group_of = np.zeros(len(layouts), dtype=int)
        self.index_of = np.zeros(len(layouts), dtype=int)
        self.peak = memory.least(task.model, task.runner, task.job.precision, layouts)
        self.exact = np.zeros(len(layouts), dtype=bool)
        self.step_s = np.full(len(layouts), np.inf)
        limit = task.cluster.device.memory_bytes if only_fitting else np.inf
        specs = (task.model, task.job, task.cluster, task.runner)
        possible = np.flatnonzero(self.peak <= limit)
        for footprint in footprints(*specs, layouts.take(possible)):
            footprint = replace(footprint, rows=possible[footprint.rows])
            self.peak[footprint.rows] = footprint.memory_bytes.max(1)
            self.exact[footprint.rows] = True
            keep = self.peak[footprint.rows] <= limit
            if keep.any():
                self._add(price(*specs, footprint.take(keep)))
        self.fits: Array = self.peak <= task.cluster.device.memory_bytes

    def _add(self, group: Group) -> None:
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
        layout = self.layouts.layout(row)
        if layout.pipeline == 1:
            return self.bound_s(row)
        group, index = self.place(row)
        shape = (layout.pipeline, layout.virtual_stages, layout.num_micro_batches(self.task.job.global_batch))
        return timeline.replay_s(layout.schedule, group.times, index, *shape)

    def plan(self, row: int, pipeline_s: float | None = None) -> Plan:
        """Candidate `row` with its Prediction; replayed unless its pipeline's seconds are given."""
        task, (group, index) = self.task, self.place(row)
        seconds = self.replayed_s(row) if pipeline_s is None else pipeline_s
        prediction = describe.prediction(task.job, task.runner, group, index, seconds)
        layout = self.layouts.layout(row)
        return Plan(model=task.model, cluster=task.cluster, job=task.job, layout=layout, prediction=prediction)

    def best(self, top: int) -> tuple[list[tuple[int, float]], int]:
        """The `top` fastest that fit, by replayed time, as (row, seconds of the pipeline); and how many were replayed.

        A layout whose bound is above the slowest of them cannot be among them.
        """
        rows = np.flatnonzero(self.fits)
        order = rows[np.lexsort((self.peak[rows], self.step_s[rows]))]
        played: list[tuple[float, float, int, float]] = []
        for row in order.tolist():
            played.sort()
            if len(played) >= top and self.step_s[row] > played[top - 1][0]:
                break
            pipeline_s = self.replayed_s(row)
            group, index = self.place(row)
            total_s = self.task.runner.factor * (pipeline_s + float(group.tail_s[index]))
            played.append((round(total_s, 9), float(self.peak[row]), row, pipeline_s))
        played.sort()
        return [(row, pipeline_s) for _, _, row, pipeline_s in played[:top]], len(played)

    def scan(self, tensors: list[int], winner: Plan) -> Iterator[Scanned]:
        """For each tensor size that some layout has, the best layout and what it loses, or why there is none."""
        for tensor in tensors:
            legal_rows = np.flatnonzero(self.layouts.tensor == tensor)
            rows = legal_rows[self.fits[legal_rows]]
            if len(rows):
                fastest = int(rows[np.argmin(self.step_s[rows])])
                best = winner if winner.layout.tensor == tensor else self.plan(fastest, self.bound_s(fastest))
                slower = max(0.0, advice.step_s(best) / advice.step_s(winner) - 1.0)
                yield Scanned(tensor=tensor, plan=best, slower=slower, because=advice.difference(best, winner))
            elif len(legal_rows):
                smallest, _ = self.smallest(legal_rows)
                yield Scanned(tensor=tensor, plan=None, slower=np.inf, because=self.memory_sum(smallest))

    def front(self, first: tuple[int, float]) -> list[int]:
        """Layouts that fit and, by the bound, are slower than the `first` (row and seconds of its pipeline), in rising
        order of time, each smaller than it and all before."""
        row, pipeline_s = first
        group, index = self.place(row)
        fastest = self.task.runner.factor * (pipeline_s + float(group.tail_s[index]))
        rows = np.flatnonzero(self.fits & (self.step_s >= fastest))
        order = np.concatenate(([row], rows[np.lexsort((self.peak[rows], self.step_s[rows]))])).astype(int)
        least = np.minimum.accumulate(self.peak[order])
        kept: list[int] = order[1:][least[1:] < least[:-1]].tolist()
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
        return _Priced(self.task, of([layout]), only_fitting=False).plan(0)

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
            reason="does not fit into memory",
            count=len(over),
            example=self.layouts.layout(row),
            detail=self.memory_sum(row),
            instead=instead,
        )


def _counts(plan: Plan) -> str:
    return ", ".join(map(str, plan.layout.stage_layers or ()))


def _axes_given(task: Task) -> bool:
    """Whether the axes that stay use up all devices, so that none was chosen."""
    sizes = [int(task.given.get(axis, 1)) for axis in AXES]
    return math.prod(sizes) == task.cluster.num_devices > 1


def _legal(task: Task) -> tuple[Candidates, Candidates, list[Rejection]]:
    """All candidates, the legal ones, and the rest by the first rule that each breaks."""
    everything = enumerate_all(task.model, task.job, task.cluster, task.runner.space, task.given)
    rules = legal.illegal(task.model, task.job, task.cluster, everything)
    if task.runner.name == OURS:
        rules["what the trainer cannot run"] = legal.cannot_run(everything)
    broken, rejected = np.zeros(len(everything), dtype=bool), []
    for reason, mask in rules.items():
        fresh = np.flatnonzero(mask & ~broken)
        if len(fresh):
            example = everything.layout(int(fresh[0]))
            found = problems(task.model, task.job, task.cluster, example) or engine_problems(example)
            detail, instead = (found[0].what, found[0].instead) if found else (reason, "")
            rejected.append(Rejection(reason=reason, count=len(fresh), example=example, detail=detail, instead=instead))
        broken |= mask
    return everything, everything.take(~broken), rejected


def _nothing_legal(task: Task, rejected: list[Rejection]) -> list[Problem]:
    """What to say when no layout is legal."""
    if rejected:
        return [Problem(what=entry.detail, where="layout", instead=entry.instead) for entry in rejected]
    kept = ", ".join(f"{key} = {value}" for key, value in task.given.items()) or "nothing"
    what = f"no layout of {task.cluster.num_devices} devices keeps {kept}"
    return [Problem(what=what, where="layout", instead="axis sizes whose product divides the number of devices")]


def _larger(task: Task, priced: _Priced) -> str:
    """The least change with which some layout fits, each tried: more nodes, a shorter sequence, a key of [layout] left
    out, devices with more memory."""
    found = []
    for times in (2, 4, 8, 16, 32, 64):
        nodes = task.cluster.num_nodes * times
        if _some_fit(replace(task, cluster=replace(task.cluster, num_nodes=nodes))):
            found.append(f"cluster.num_nodes = {nodes}")
            break
    for parts in (2, 4, 8, 16):
        seq_len = task.job.seq_len // parts
        if seq_len and _some_fit(replace(task, job=replace(task.job, seq_len=seq_len))):
            found.append(f"job.seq_len = {seq_len}")
            break
    free = [key for key in task.given if _some_fit(_without(task, [key]))]
    if free:
        found.append(f"no {' or no '.join(f'layout.{key}' for key in free)}")
    elif task.given and _some_fit(_without(task, task.given)):
        found.append("none of the keys under [layout]")
    row, needed = priced.smallest(np.arange(len(priced.layouts)))
    found.append(f"devices with {format_bytes(needed)}, for {priced.layouts.layout(row)}")
    return ", or ".join(found)


def _without(task: Task, keys: Iterable[str]) -> Task:
    return replace(task, given={key: value for key, value in task.given.items() if key not in keys})


def _some_fit(task: Task) -> bool:
    """Whether any layout of a changed task fits."""
    _, layouts, _ = _legal(task)
    return len(layouts) > 0 and bool(_Priced(task, layouts).fits.any())
