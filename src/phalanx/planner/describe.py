"""Describe: numbers of one layout out of the arrays, and the words for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.plan.plan import Prediction
from phalanx.planner.candidates import ARRAYS, RECOMPUTES, Array, Candidates
from phalanx.planner.costs import Pass
from phalanx.planner.engine import Engine
from phalanx.planner.estimate import Footprint, Group
from phalanx.spec.job import JobSpec
from phalanx.units import format_bytes


def prediction(job: JobSpec, engine: Engine, group: Group, index: int, pipeline_s: float) -> Prediction:
    """The Prediction of layout `index` of `group`; `pipeline_s` seconds of the pipeline, before the engine's factor."""
    step_s = engine.factor * (pipeline_s + float(group.tail_s[index]))
    num_stages = group.footprint.held.elements.shape[1]
    memory = tuple(
        {
            kind: int(np.broadcast_to(values, group.footprint.held.elements.shape)[index, stage])
            for kind, values in group.footprint.memory.items()
        }
        for stage in range(num_stages)
    )
    return Prediction(
        memory_bytes=memory,
        step_s=step_s,
        step_s_by_kind=by_kind(job, engine, group, index, pipeline_s),
        assumptions=assumptions(job, engine),
    )


def assumptions(job: JobSpec, engine: Engine) -> tuple[str, ...]:
    """What a prediction rests on."""
    separate = "documents are counted as if they were joined: apart, attention costs less and its output is kept twice"
    return (
        f"engine {engine.name}: {engine.source}",
        "no other load on devices or network; clocks as in the device's measured efficiencies",
        "data loading, validation, checkpoints and the first steps are not counted",
        *([separate] if job.data.documents == "separate" else []),
    )


def by_kind(job: JobSpec, engine: Engine, group: Group, index: int, pipeline_s: float) -> dict[str, float]:
    """Seconds of a step by kind, on the pipeline coordinate with most work; "pipeline" is its waiting."""
    micro_batches = int(group.footprint.layouts.num_micro_batches(job.global_batch)[index])
    work = (group.times.forward_s[index] + group.times.backward_s[index])[group.footprint.places].sum(0) * micro_batches
    at = int(np.argmax(work))
    weights = {
        "layer": float(group.footprint.layers.sum(0)[at]),
        "embedding": float((group.footprint.places[:, at] == 0).any()),
    }
    weights["head"] = float((group.footprint.places[:, at] == group.footprint.places.max()).any())
    kinds = dict.fromkeys(("compute", "recompute", "tensor"), 0.0)
    repeated = float(group.footprint.repeated[index].sum(0)[at])
    passes = {f"{block}_{direction}": weights[block] for block in weights for direction in ("forward", "backward")}
    passes |= {"layer_backward": repeated, "layer_backward_plain": weights["layer"] - repeated}
    for name, weight in passes.items():
        part: Pass = getattr(group.footprint.costs, name)
        for kind in kinds:
            kinds[kind] += weight * micro_batches * _at(getattr(part, f"{kind}_s"), index)
    kinds["host and gathers"] = max(0.0, float(work[at]) - sum(kinds.values()))
    kinds["pipeline"] = max(0.0, pipeline_s - float(work[at]))
    tail = float(group.tail_s[index])
    kinds["data"] = min(tail, _at(group.tail.exposed_s[:, at], index))
    kinds["optimizer"] = tail - kinds["data"]
    return {kind: engine.factor * seconds for kind, seconds in kinds.items()}


def _at(values: Any, index: int) -> float:
    return float(values[index]) if np.ndim(values) else float(values)


def memory_sum(footprint: Footprint, index: int, limit: int) -> str:
    """As `stage 0 needs 93.1 GiB of 80.0 GiB: 41.2 optimizer, 33.0 …`."""
    stage = int(np.argmax(footprint.memory_bytes[index]))
    shape = footprint.held.elements.shape
    parts = {kind: float(np.broadcast_to(v, shape)[index, stage]) for kind, v in footprint.memory.items()}
    listed = sorted(((size, kind) for kind, size in parts.items() if size > 0), reverse=True)
    words = ", ".join(f"{format_bytes(size)} {kind}" for size, kind in listed)
    needed = sum(parts.values())
    found, there = format_bytes(needed), format_bytes(limit)
    close = f", {format_bytes(needed - limit)} too much" if found == there and needed > limit else ""
    return f"stage {stage} needs {found} of {there}{close}: {words}"


def nearest_change(layouts: Candidates, row: int, fitting: Array, step_s: Array) -> str:
    """The fitting layout that differs in the fewest options from `row` (the fastest of those), as words."""
    distance = sum((getattr(layouts, name)[fitting] != getattr(layouts, name)[row]).astype(int) for name in ARRAYS)
    nearest = int(fitting[np.lexsort((step_s[fitting], np.asarray(distance)))[0]])
    changed = [name for name in ARRAYS if getattr(layouts, name)[nearest] != getattr(layouts, name)[row]]
    return ", ".join(f"{name} = {_value(layouts, name, nearest)}" for name in changed)


def _value(layouts: Candidates, name: str, row: int) -> str:
    value = int(getattr(layouts, name)[row])
    if name == "schedule":
        return layouts.schedules[value]
    if name == "recompute":
        return RECOMPUTES[value]
    return str(bool(value)).lower() if name == "sequence_parallel" else str(value)
