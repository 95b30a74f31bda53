"""Search: every legal layout, priced, ranked; and why the others lost.

Exact: all layouts are priced by the bound, and replayed in its order until no unplayed one can still be among the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.errors import LayoutError, Problem
from phalanx.plan.layout import Layout
from phalanx.plan.legality import engine_problems, problems
from phalanx.plan.plan import Plan
from phalanx.planner import certainty, legal
from phalanx.planner.advice import reasons
from phalanx.planner.candidates import Candidates, distinct, enumerate_all, of
from phalanx.planner.comparison import Comparison, compare
from phalanx.planner.engine import OURS, engine, profiles
from phalanx.planner.ranking import Alike, Ranking, Rejection, Task
from phalanx.planner.variants import HANDFUL, advised, around
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """`plans` best first, each with its Prediction, one for each way to cut the work; others `alike` that
    differ from each in fine options alone; `reasons` for the first, in words; `beside` it, the
    best of each shape and tensor size; the `front` of layouts that no other beats in both time and memory; `rejected`
    by reason; how many layouts were looked at, how many of them fit, and how many had their schedule replayed."""

    plans: tuple[Plan, ...]
    alike: tuple[tuple[Alike, ...], ...]
    reasons: tuple[str, ...]
    beside: Comparison
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
    task = Task(model=model, job=job, cluster=cluster, runner=engine(engine_name, job), given=dict(given or {}))
    if model.num_experts and engine_name == OURS:
        others = ", ".join(name for name in profiles() if name != OURS)
        what = f"{model.name} has experts, which the trainer does not run"
        raise LayoutError(what, instead=f"--engine, one of {others}")
    looked_at, layouts, rejected = _legal(task)
    if not len(layouts):
        raise LayoutError(_nothing_legal(task, rejected))
    priced = Ranking(task, layouts)
    if engine_name == OURS and priced.fits.any():
        priced.add(around(task, layouts.take(np.array(priced.best(HANDFUL), dtype=int))))
    num_varied = len(priced.layouts) - len(layouts)
    if not priced.fits.all():
        rejected.append(priced.too_large())
    shifted = None if priced.fits.any() else priced.shifted()
    if shifted:
        layouts = of([shifted.layout])
        priced = Ranking(task, layouts)
    if not priced.fits.any():
        what = f"no layout fits into memory; of the smallest, {rejected[-1].detail}"
        raise LayoutError(Problem(what=what, where=cluster.name, instead=_larger(task, priced)))
    best = priced.best(top)
    fastest, first = best[0], priced.simplest(best[0])
    rows = [first, *(row for row in best if row != first)][:top]
    plans = tuple(map(priced.plan, rows))
    beside = compare(priced, first, plans[0], sorted(looked_at))
    return Search(
        plans=plans,
        alike=tuple(map(priced.alike, rows)),
        reasons=(
            *reasons(plans, priced.plan(fastest), beside.shapes, task.runner.tie, task.given),
            *(advised(task, plans[0]) if engine_name == OURS else ()),
            certainty.words(plans[0].layout, cluster, engine_name),
            *((f"stages of equal work do not fit: {_counts(plans[0])} layers do",) if shifted else ()),
        ),
        beside=beside,
        front=tuple(priced.plan(row, priced.bound_s(row) if row != fastest else None) for row in priced.front(fastest)),
        rejected=tuple(rejected),
        num_layouts=sum(looked_at.values()) + num_varied,
        num_fitting=int(priced.fits.sum()),
        num_replayed=len(priced.replayed),
        engine=task.runner.name,
    )


def glance(
    model: ModelSpec, job: JobSpec, cluster: ClusterSpec, given: Mapping[str, Any], *, engine_name: str = OURS
) -> Plan | None:
    """A first answer, before `search` has looked at thousands of devices: the best layout under plain 1F1B, None where
    no such layout is legal and fits."""
    if model.num_experts and engine_name == OURS:
        return None  # search says why
    runner = engine(engine_name, job)
    plain = replace(runner.space, schedules=("1f1b",), recompute_every=(1,), zero_in_node=False)
    task = Task(model=model, job=job, cluster=cluster, runner=replace(runner, space=plain), given=dict(given))
    _, layouts, _ = _legal(task)
    priced = Ranking(task, layouts) if len(layouts) else None
    return priced.plan(priced.simplest(priced.best(1)[0])) if priced and priced.fits.any() else None


def predict(model: ModelSpec, job: JobSpec, cluster: ClusterSpec, layout: Layout, *, engine_name: str = OURS) -> Plan:
    """The Plan of one layout as `search` would price it, fitting or not. Raises LayoutError if it is illegal."""
    found = problems(model, job, cluster, layout)
    if found:
        raise LayoutError(found)
    task = Task(model=model, job=job, cluster=cluster, runner=engine(engine_name, job), given={})
    return Ranking(task, of([layout]), only_fitting=False).plan(0)


def _counts(plan: Plan) -> str:
    return ", ".join(map(str, plan.layout.stage_layers or ()))


def _legal(task: Task) -> tuple[dict[int, int], Candidates, list[Rejection]]:
    """How many candidates of each tensor size there are, those that are legal, and the rest by the first rule that each
    breaks."""
    specs = (task.model, task.job, task.cluster)

    def hopeless(tensor: int, num_ranks: int) -> bool:
        found = legal.tensor_rules(task.model, task.cluster, np.array(tensor), np.array(num_ranks))
        return any(map(bool, found.values()))

    everything, times = enumerate_all(*specs, task.runner.space, task.given, hopeless)
    rules = legal.illegal(*specs, everything)
    if task.runner.name == OURS:
        rules["what the trainer cannot run"] = legal.cannot_run(everything)
    broken, rejected = np.zeros(len(everything), dtype=bool), []
    for reason, mask in rules.items():
        fresh = np.flatnonzero(mask & ~broken)
        if len(fresh):
            example = everything.layout(int(fresh[0]))
            found = problems(task.model, task.job, task.cluster, example) or engine_problems(example)
            detail, instead = (found[0].what, found[0].instead) if found else (reason, "")
            count = int(times[fresh].sum())
            rejected.append(Rejection(reason=reason, count=count, example=example, detail=detail, instead=instead))
        broken |= mask
    sizes = everything.tensor[distinct(everything.tensor)[0]].tolist() if len(everything) else []
    looked_at = {size: int(times[everything.tensor == size].sum()) for size in sizes}
    return looked_at, everything.take(np.flatnonzero(~broken)), rejected


def _nothing_legal(task: Task, rejected: list[Rejection]) -> list[Problem]:
    """What to say when no layout is legal."""
    if rejected:
        return [Problem(what=entry.detail, where="layout", instead=entry.instead) for entry in rejected]
    kept = ", ".join(f"{key} = {value}" for key, value in task.given.items()) or "nothing"
    what = f"no layout of {task.cluster.num_devices} devices keeps {kept}"
    return [Problem(what=what, where="layout", instead="axis sizes whose product divides the number of devices")]


def _larger(task: Task, priced: Ranking) -> str:
    """The least change with which some layout fits, each tried: more nodes, a shorter sequence, a key of [layout] left
    out, devices with more memory."""
    found = [f"cluster.num_nodes = {nodes}" for nodes in _enough(task)]
    for parts in (2, 4, 8, 16):
        seq_len = task.job.seq_len // parts
        if seq_len and _some_fit(replace(task, job=replace(task.job, seq_len=seq_len))):
            found.append(f"job.seq_len = {seq_len}")
            break
    free = [key for key in task.given if _some_fit(_without(task, [key]))]
    if free:
        found.append(f"[layout] without {' or without '.join(free)}")
    elif task.given and _some_fit(_without(task, task.given)):
        found.append("none of the keys under [layout]")
    row, needed = priced.smallest(np.arange(len(priced.layouts)))
    found.append(f"devices with {_written(needed)}, for {priced.layouts.layout(row)}")
    return ", or ".join(found)


def _written(needed: float) -> str:
    """So many bytes in three digits, rounded up: who writes that has enough."""
    enough = needed
    while parse_bytes(format_bytes(enough)) < needed:
        enough *= 1.001
    return format_bytes(enough)


def _enough(task: Task) -> Iterator[int]:
    """How many nodes are enough, if any number below 64 times as many is: the first of 2, 4, 8 … times as many, or of
    what lies one, two or three quarters of the way to it."""
    there = task.cluster.num_nodes
    for times in (2, 4, 8, 16, 32, 64):
        more = times * there
        if _some_fit(replace(task, cluster=replace(task.cluster, num_nodes=more))):
            between = sorted({more * part // 8 for part in (5, 6, 7)} - {more, more // 2})
            fewer = (n for n in between if _some_fit(replace(task, cluster=replace(task.cluster, num_nodes=n))))
            yield next(fewer, more)
            return


def _without(task: Task, keys: Iterable[str]) -> Task:
    return replace(task, given={key: value for key, value in task.given.items() if key not in keys})


def _some_fit(task: Task) -> bool:
    """Whether any layout of a changed task fits."""
    _, layouts, _ = _legal(task)
    return len(layouts) > 0 and bool(Ranking(task, layouts).fits.any())
