"""Estimate: memory and time of many layouts at once. The one place where the parts of the planner come together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.plan.stages import split
from phalanx.planner import data_axis, memory, network, timeline
from phalanx.planner.candidates import Array, Candidates
from phalanx.planner.costs import Costs, costs
from phalanx.planner.engine import Engine
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

TIME_KINDS = ("compute", "recompute", "tensor", "pipeline", "data", "optimizer", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layouts that share pipeline size, schedule, virtual stages and copies of kv heads, fully priced.

    `rows` are their places among all candidates, `places` [chunks, coordinates] their stages,
    `memory` by kind is [layouts, coordinates]; `step_s` uses the bound on the pipeline's time.
    """

    rows: Array
    layouts: Candidates
    layers: Array
    places: Array
    costs: Costs
    times: timeline.StageTimes
    held: memory.Held
    memory: dict[str, Array]
    pipeline_s: Array
    tail: data_axis.Tail
    tail_s: Array
    step_s: Array

    @property
    def memory_bytes(self) -> Array:
        """All kinds together, [layouts, coordinates]."""
        return np.asarray(sum(self.memory.values()))


def stage_layers(model: ModelSpec, seq_len: int, engine: Engine, layouts: Candidates) -> Array:
    """Layers of each stage under the engine's rule, [stages]: given, balanced by cost, in equal numbers (what is left
    over goes to the first stages), with embedding and head counted as a layer each, or by thresholds."""
    stages, tensor = int(layouts.num_stages[0]), int(layouts.tensor[0])
    if layouts.stage_layers is not None or engine.balance == "cost":
        found = split(model, seq_len, stages, layouts.stage_layers, tensor=tensor)
        return np.array([len(stage.layers) for stage in found])
    if engine.balance == "thresholds":
        return _thresholds(model, stages)
    extra = 2 if engine.balance == "blocks" and stages > 1 else 0
    blocks = model.num_layers + extra
    counts = np.full(stages, blocks // stages) + (np.arange(stages) < blocks % stages)
    if extra:
        counts[0] -= 1
        counts[-1] -= 1
    return counts


def _thresholds(model: ModelSpec, stages: int) -> Array:
    """nanotron's rule: blocks in order, a stage closes once the cost so far passes its share of the whole; cost counts
    parameters of matrices, the head included. Early stages thus get more than their share."""
    layer = 2 * model.hidden * (model.q_rows + model.kv_rows) + (3 if model.gated else 2) * model.hidden * model.ffn
    total = model.num_layers * layer + model.hidden * model.vocab
    counts, stage = np.zeros(stages, dtype=int), 0
    for number in range(model.num_layers):
        counts[stage] += 1
        if (number + 1) * layer > total * (stage + 1) / stages and stage + 1 < stages:
            stage += 1
    return counts


def estimate(
    model: ModelSpec, job: JobSpec, cluster: ClusterSpec, engine: Engine, layouts: Candidates
) -> Iterator[Group]:
    """Price every layout, in groups. Layouts must be legal."""
    if not len(layouts):
        return
    priced = costs(model, job, cluster, engine, layouts)
    keys = (layouts.pipeline * (model.num_layers + 1) + layouts.virtual_stages) * len(layouts.schedules)
    keys = keys + layouts.schedule
    # Copied kv heads make layers dearer, so the balance of stages may differ.
    copies = np.maximum(1, layouts.tensor // model.num_kv_heads)
    keys = keys * (int(copies.max()) + 1) + copies
    order = np.argsort(keys, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        yield _group(model, job, cluster, engine, layouts.take(rows), priced.take(rows), rows)


def _group(
    model: ModelSpec,
    job: JobSpec,
    cluster: ClusterSpec,
    engine: Engine,
    layouts: Candidates,
    priced: Costs,
    rows: Array,
) -> Group:
    pipeline, num_micro_batches = int(layouts.pipeline[0]), layouts.num_micro_batches(job.global_batch)
    name = layouts.schedules[int(layouts.schedule[0])]
    places = timeline.stage_places(name, pipeline, int(layouts.virtual_stages[0]))
    per_stage = stage_layers(model, job.seq_len, engine, layouts)
    layers, ends = per_stage[places], (0, int(np.argmax((places == len(per_stage) - 1).any(0))))
    held = memory.held_elements(model, layouts, layers, ends)
    links = network.placements(cluster, layouts)
    layer = memory.elements(model, layouts).layer
    gathers = data_axis.gathers(cluster, engine, job.precision, layouts, links["shards"], layer)
    boundary = priced.boundary_bytes / (layouts.tensor if engine.scatter_boundary else 1)
    transfer_s = network.point_to_point_s(cluster, boundary, links["pipeline"])
    times = timeline.stage_times(priced, per_stage, gathers, transfer_s, engine)
    pipeline_s = timeline.bound(name, times, places, num_micro_batches)
    forward_s, backward_s = times.forward_s[:, places], times.backward_s[:, places]
    tail = data_axis.tail(
        cluster,
        engine,
        job.precision,
        layouts,
        held,
        layers.sum(0),
        num_micro_batches,
        backward_s.sum(1),
        forward_s.sum(1),
    )
    # A later coordinate ends its last backward earlier than the first: that much of its tail costs nothing.
    slack = np.cumsum(backward_s[:, 0], 1) - backward_s[:, 0] + np.arange(pipeline) * times.transfer_s[:, None]
    tail_s = np.maximum(0.0, (tail.exposed_s + tail.optimizer_s - slack).max(1)) + engine.host_step_s
    return Group(
        rows=rows,
        layouts=layouts,
        layers=layers,
        places=places,
        costs=priced,
        times=times,
        held=held,
        memory=memory.memory(engine, job.precision, layouts, held, priced, layers, num_micro_batches, ends),
        pipeline_s=pipeline_s,
        tail=tail,
        tail_s=tail_s,
        step_s=engine.factor * (pipeline_s + tail_s),
    )


def in_order(groups: list[Group], get: Callable[[Group], Array], size: int) -> Array:
    """One value per layout, in the order of the candidates."""
    result = np.empty(size)
    for group in groups:
        result[group.rows] = get(group)
    return result
