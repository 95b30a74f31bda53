"""Search: every legal layout, priced, ranked; and why the others lost.

Exact: all layouts are priced by the bound, and replayed in its order until no unplayed one can still be among the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.errors import LayoutError, Problem
from phalanx.plan.layout import Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.planner import advice, describe, legal, timeline
from phalanx.planner.advice import Scanned, reasons
from phalanx.planner.candidates import Array, Candidates, enumerate_all, of
from phalanx.planner.engine import OURS, Engine, engine, profiles
from phalanx.planner.estimate import Group, estimate
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec


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
    runner, given = engine(engine_name), dict(given or {})
    if model.num_experts and runner.name == OURS:
        others = ", ".join(name for name in profiles() if name != OURS)
        raise LayoutError(
            f"{model.name} has experts, which the trainer does not run", instead=f"--engine, one of {others}"
        )
    everything = enumerate_all(model, job, cluster.num_devices, runner.space, given)
    rules = legal.illegal(model, job, cluster, everything)
    if runner.name == OURS:
        rules["what the trainer cannot run"] = legal.cannot_run(everything)
    broken = np.zeros(len(everything), dtype=bool)
    rejected = []
    for reason, mask in rules.items():
        fresh = np.flatnonzero(mask & ~broken)
        if len(fresh):
            rejected.append(_illegal(model, job, cluster, everything, reason, fresh))
        broken |= mask
    layouts = everything.take(~broken)
    if not len(layouts):
        raise LayoutError(_nothing_legal(model, job, cluster, rejected, given))
    groups = list(estimate(model, job, cluster, runner, layouts))
    peak = _scatter(groups, len(layouts), lambda group: group.memory_bytes.max(1))
    step_s = _scatter(groups, len(layouts), lambda group: group.step_s)
    fits = peak <= cluster.device.memory_bytes
    if not fits.all():
        rejected.append(_too_large(cluster, layouts, groups, peak, step_s, fits))
    if not fits.any():
        raise LayoutError(Problem(what=rejected[-1].detail, where=cluster.name, instead=rejected[-1].instead))
    best, replayed = _replay(job, runner, layouts, groups, step_s, peak, np.flatnonzero(fits), top)

    def plan(row: int, pipeline_s: float | None = None) -> Plan:
        group, index = _place(groups, row)
        seconds = _pipeline_s(job, group, index, layouts.layout(row)) if pipeline_s is None else pipeline_s
        prediction = describe.prediction(job, runner, group, index, seconds)
        return Plan(model=model, cluster=cluster, job=job, layout=layouts.layout(row), prediction=prediction)

    plans = tuple(plan(row, pipeline_s) for row, pipeline_s in best)
    scan = tuple(_scan(everything, layouts, fits, peak, step_s, groups, cluster, plans[0], plan))
    return Search(
        plans=plans,
        reasons=reasons(plans, scan, runner.tie),
        scan=scan,
        front=tuple(plan(row, _bound_s(groups, row)) for row in _front(step_s, peak, np.flatnonzero(fits))),
        rejected=tuple(rejected),
        num_layouts=len(everything),
        num_fitting=int(fits.sum()),
        num_replayed=replayed,
        engine=runner.name,
    )


def _scan(
    everything: Candidates,
    layouts: Candidates,
    fits: Array,
    peak: Array,
    step_s: Array,
    groups: list[Group],
    cluster: ClusterSpec,
    winner: Plan,
    plan: Callable[[int], Plan],
) -> Iterator[Scanned]:
    """For each tensor size, the best layout and what it loses, or why there is none."""
    for tensor in np.unique(everything.tensor).tolist():
        legal_rows = np.flatnonzero(layouts.tensor == tensor)
        rows = legal_rows[fits[legal_rows]]
        if len(rows):
            best = winner if winner.layout.tensor == tensor else plan(int(rows[np.argmin(step_s[rows])]))
            slower = advice.step_s(best) / advice.step_s(winner) - 1.0
            yield Scanned(tensor=tensor, plan=best, slower=slower, because=advice.difference(best, winner))
        elif len(legal_rows):
            group, index = _place(groups, int(legal_rows[np.argmin(peak[legal_rows])]))
            because = describe.memory_sum(group, index, cluster.device.memory_bytes)
            yield Scanned(tensor=tensor, plan=None, slower=np.inf, because=because)


def _bound_s(groups: list[Group], row: int) -> float:
    """The bound on the pipeline's time of candidate `row`."""
    group, index = _place(groups, row)
    return float(group.pipeline_s[index])


def _front(step_s: Array, peak: Array, rows: Array) -> list[int]:
    """Layouts in rising order of time, each smaller than all before it."""
    order = rows[np.lexsort((peak[rows], step_s[rows]))]
    least = np.minimum.accumulate(peak[order])
    kept: list[int] = order[np.concatenate(([True], least[1:] < least[:-1]))].tolist()
    return kept


def predict(model: ModelSpec, job: JobSpec, cluster: ClusterSpec, layout: Layout, *, engine_name: str = OURS) -> Plan:
    """The Plan of one layout as `search` would price it, fitting or not. Raises LayoutError if it is illegal."""
    found = problems(model, job, cluster, layout)
    if found:
        raise LayoutError(found)
    runner, layouts = engine(engine_name), of([layout])
    (group,) = estimate(model, job, cluster, runner, layouts)
    pipeline_s = _pipeline_s(job, group, 0, layout)
    prediction = describe.prediction(job, runner, group, 0, pipeline_s)
    return Plan(model=model, cluster=cluster, job=job, layout=layout, prediction=prediction)


def _scatter(groups: list[Group], size: int, get: Any) -> Array:
    result = np.empty(size)
    for group in groups:
        result[group.rows] = get(group)
    return result


def _place(groups: list[Group], row: int) -> tuple[Group, int]:
    """Which group holds candidate `row`, and where in it."""
    for group in groups:
        (index,) = np.nonzero(group.rows == row)
        if len(index):
            return group, int(index[0])
    raise AssertionError(f"no group holds {row}")


def _pipeline_s(job: JobSpec, group: Group, index: int, layout: Layout) -> float:
    """Seconds of the pipeline from the layout's own schedule."""
    if layout.pipeline == 1:
        return float(group.pipeline_s[index])
    return timeline.replay_s(
        layout.schedule,
        group.times,
        index,
        layout.pipeline,
        layout.virtual_stages,
        layout.num_micro_batches(job.global_batch),
    )


def _replay(
    job: JobSpec,
    runner: Engine,
    layouts: Candidates,
    groups: list[Group],
    step_s: Array,
    peak: Array,
    rows: Array,
    top: int,
) -> tuple[list[tuple[int, float]], int]:
    """The `top` fastest by replayed time. A layout whose bound is above the slowest of them cannot be among them."""
    order = rows[np.lexsort((peak[rows], np.round(np.log(step_s[rows]), 4)))]
    order = order[np.argsort(step_s[order], kind="stable")]
    played: list[tuple[float, float, int, float]] = []
    for row in order.tolist():
        played.sort()
        if len(played) >= top and step_s[row] > played[top - 1][0]:
            break
        group, index = _place(groups, row)
        pipeline_s = _pipeline_s(job, group, index, layouts.layout(row))
        total_s = runner.factor * (pipeline_s + float(group.tail_s[index]))
        played.append((round(total_s, 9), float(peak[row]), row, pipeline_s))
    played.sort()
    return [(row, pipeline_s) for _, _, row, pipeline_s in played[:top]], len(played)


def _illegal(
    model: ModelSpec, job: JobSpec, cluster: ClusterSpec, layouts: Candidates, reason: str, rows: Array
) -> Rejection:
    """Legality's own words for the first layout that breaks the rule."""
    example = layouts.layout(int(rows[0]))
    found = problems(model, job, cluster, example) or engine_problems(example)
    detail = found[0].what if found else reason
    instead = found[0].instead if found else ""
    return Rejection(reason=reason, count=len(rows), example=example, detail=detail, instead=instead)


def _nothing_legal(
    model: ModelSpec, job: JobSpec, cluster: ClusterSpec, rejected: list[Rejection], given: Mapping[str, Any]
) -> list[Problem]:
    """What to say when no layout is legal."""
    if rejected:
        return [Problem(what=entry.detail, where="layout", instead=entry.instead) for entry in rejected]
    kept = ", ".join(f"{key} = {value}" for key, value in given.items()) or "nothing"
    what = f"no layout of {cluster.num_devices} devices keeps {kept}"
    return [Problem(what=what, where="layout", instead="axis sizes whose product divides the number of devices")]


def _too_large(
    cluster: ClusterSpec, layouts: Candidates, groups: list[Group], peak: Array, step_s: Array, fits: Array
) -> Rejection:
    """The fastest layout that does not fit (the smallest, when none does), its sum, and the nearest one that does."""
    over = np.flatnonzero(~fits)
    row = int(over[np.argmin(step_s[over])]) if fits.any() else int(np.argmin(peak))
    group, index = _place(groups, row)
    instead = describe.nearest_change(layouts, row, np.flatnonzero(fits), step_s) if fits.any() else ""
    return Rejection(
        reason="does not fit into memory",
        count=len(over),
        example=layouts.layout(row),
        detail=describe.memory_sum(group, index, cluster.device.memory_bytes),
        instead=instead or advice.smaller(layouts.layout(row)),
    )
