"""Describe: numbers of one layout out of the arrays, and the words for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from phalanx.plan.plan import Prediction
from phalanx.planner import timeline
from phalanx.planner.candidates import ARRAYS, OUTERMOST, RECOMPUTES, Array, Candidates
from phalanx.planner.costs import Pass
from phalanx.planner.engine import Engine
from phalanx.planner.estimate import Footprint, Group
from phalanx.spec.job import JobSpec
from phalanx.units import format_bytes


def prediction(job: JobSpec, engine: Engine, group: Group, index: int, pipeline_s: float) -> Prediction:
    """The Prediction of layout `index` of `group`; `pipeline_s` seconds of the pipeline, before the engine's factor."""
    step_s = engine.factor * (pipeline_s + float(group.tail_s[index]))
    shape = group.footprint.held.elements.shape
    by_stage = {kind: np.broadcast_to(values, shape)[index].tolist() for kind, values in group.footprint.memory.items()}
    memory = tuple({kind: int(values[stage]) for kind, values in by_stage.items()} for stage in range(shape[1]))
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
    """Seconds of a step by kind, on the pipeline coordinate with most work; "pipeline" is its waiting for others, and
    of messages only what nothing hides counts."""
    micro_batches = int(group.footprint.layouts.num_micro_batches(job.global_batch)[index])
    work = (group.times.forward_s[index] + group.times.backward_s[index])[group.footprint.places].sum(0) * micro_batches
    at = int(np.argmax(work))
    kinds = {kind: micro_batches * seconds for kind, seconds in _of_micro_batch(group, index, at).items()}
    kinds["host"] = max(0.0, float(work[at]) - sum(kinds.values()))
    on_the_way = max(0.0, pipeline_s - _without_transfers_s(group, index, pipeline_s, micro_batches))
    kinds["transfer"] += on_the_way
    kinds["pipeline"] = max(0.0, pipeline_s - float(work[at]) - on_the_way)
    tail = float(group.tail_s[index])
    kinds["data"] = min(tail, _at(group.tail.exposed_s[:, at], index))
    kinds["optimizer"] = tail - kinds["data"]
    return {kind: engine.factor * seconds for kind, seconds in kinds.items()}


def _of_micro_batch(group: Group, index: int, at: int) -> dict[str, float]:
    """Seconds of one micro-batch on pipeline coordinate `at`, besides what the host adds."""
    footprint, gathers = group.footprint, group.gathers
    price = int(footprint.costs.which[index])
    stages, last = footprint.places[:, at], footprint.places.max()
    layers, repeated = float(footprint.layers.sum(0)[at]), float(footprint.repeated[footprint.case[index]].sum(0)[at])
    weights = {
        "layer_forward": layers,
        "layer_backward": repeated,
        "layer_backward_plain": layers - repeated,
        **dict.fromkeys(("embedding_forward", "embedding_backward"), float((stages == 0).any())),
        **dict.fromkeys(("head_forward", "head_backward"), float((stages == last).any())),
    }
    kinds = dict.fromkeys(("compute", "recompute", "tensor", "gathers"), 0.0)
    for name, weight in weights.items():
        part: Pass = getattr(footprint.costs, name)
        for kind in ("compute", "recompute", "tensor"):
            kinds[kind] += weight * _at(getattr(part, f"{kind}_s"), price)
        if name.startswith("layer"):
            gather = _at(gathers.forward_s if name == "layer_forward" else gathers.backward_s, index)
            kinds["gathers"] += weight * max(gathers.tax * gather, gather - _at(part.total_s, price))
    ends = int((stages > 0).sum() + (stages < last).sum())
    return {**kinds, "transfer": ends * _at(group.waits_s, index)}


def _without_transfers_s(group: Group, index: int, pipeline_s: float, micro_batches: int) -> float:
    """Seconds of the pipeline were its messages free: by the bound where `pipeline_s` is the bound, else replayed."""
    layout, places = group.footprint.layouts.layout(index), group.footprint.places
    if layout.pipeline == 1:
        return pipeline_s
    alone = group.times.take(np.array([index]))
    alone = replace(alone, transfer_s=np.zeros(1))
    if pipeline_s == float(group.pipeline_s[index]):
        return float(timeline.bound(layout.schedule, alone, places, np.array([micro_batches]))[0])
    return timeline.replay_s(layout.schedule, alone, 0, layout.pipeline, layout.virtual_stages, micro_batches)


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
    if name in ("recompute", "outermost"):
        return RECOMPUTES[value] if name == "recompute" else OUTERMOST[value]
    return str(bool(value)).lower() if name == "sequence_parallel" else str(value)
