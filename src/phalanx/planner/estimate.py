"""Estimate: memory and time of many layouts at once. The one place where the parts of the planner come together."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.plan.groups import kv_copies
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import SCHEDULES
from phalanx.plan.stages import split
from phalanx.plan.walk import Walk
from phalanx.planner import data_axis, memory, network, timeline
from phalanx.planner.candidates import Array, Candidates, distinct, of
from phalanx.planner.costs import Costs, costs
from phalanx.planner.engine import Engine
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Layouts that share pipeline size, places of stages and copies of kv heads, with what they need of memory.

    `rows` are their places among all candidates, `places` [chunks, coordinates] their stages, `layers` (same shape)
    the layers of each, `repeated` [cases, chunks, coordinates] those of them that are recomputed, if any are, `closing`
    (same shape) whether the last of them is, and `case` [layouts] which of these cases each layout is; `memory` by kind
    is [layouts, coordinates]; `tied` [layouts, coordinates]: elements of an embedding that a second coordinate holds as
    well.
    """

    rows: Array
    layouts: Candidates
    places: Array
    layers: Array
    repeated: Array
    closing: Array
    case: Array
    costs: Costs
    held: memory.Held
    memory: dict[str, Array]
    tied: Array

    @property
    def memory_bytes(self) -> Array:
        """All kinds together, [layouts, coordinates]."""
        return np.asarray(sum(self.memory.values()))

    def take(self, index: Array) -> Footprint:
        """Those at `index` (numbers or a mask)."""
        shape = self.held.elements.shape
        return Footprint(
            rows=self.rows[index],
            layouts=self.layouts.take(index),
            places=self.places,
            layers=self.layers,
            repeated=self.repeated,
            closing=self.closing,
            case=self.case[index],
            costs=self.costs.take(index),
            held=self.held.take(index),
            memory={kind: np.broadcast_to(values, shape)[index] for kind, values in self.memory.items()},
            tied=self.tied[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A footprint, fully priced; `step_s` uses the bound on the pipeline's time. `gathers` and `waits_s` [layouts], the
    part of one transfer that compute waits for at either end, are counted in `times` already."""

    footprint: Footprint
    times: timeline.StageTimes
    gathers: data_axis.Gathers
    waits_s: Array
    pipeline_s: Array
    tail: data_axis.Tail
    tail_s: Array
    step_s: Array

    @property
    def rows(self) -> Array:
        """Places among all candidates."""
        return self.footprint.rows

    @property
    def memory_bytes(self) -> Array:
        """All kinds together, [layouts, coordinates]."""
        return self.footprint.memory_bytes


def pipeline_walk(plan: Plan, engine: Engine, num_micro_batches: int) -> Walk:
    """The schedule of a legal plan with its predicted times, for so many micro-batches."""
    layout = plan.layout
    (group,) = estimate(plan.model, plan.job, plan.cluster, engine, of([layout]))
    shape = (layout.pipeline, layout.virtual_stages, num_micro_batches)
    times = timeline.replay(layout.schedule, group.times, 0, *shape)
    scaled = (tuple(tuple(engine.factor * s for s in row) for row in rows) for rows in (times.starts_s, times.ends_s))
    return Walk(starts_s=next(scaled), ends_s=next(scaled))


def stage_layers(model: ModelSpec, seq_len: int, engine: Engine, layouts: Candidates) -> Array:
    """Layers of each stage under the engine's rule, [stages]: given, balanced by cost, in equal numbers (what is left
    over goes to the first stages), with embedding and head counted as a layer each, or by thresholds."""
    stages, tensor = int(layouts.num_stages[0]), int(layouts.tensor[0])
    if layouts.stage_layers is not None or engine.balance == "cost":
        return np.array(_by_cost(model, seq_len, stages, layouts.stage_layers, kv_copies(model, tensor)))
    if engine.balance == "thresholds":
        return _thresholds(model, stages)
    extra = 2 if engine.balance == "blocks" and stages > 1 else 0
    blocks = model.num_layers + extra
    counts = np.full(stages, blocks // stages) + (np.arange(stages) < blocks % stages)
    if extra:
        counts[0] -= 1
        counts[-1] -= 1
    return counts


@functools.lru_cache(maxsize=1024)
def _by_cost(
    model: ModelSpec, seq_len: int, stages: int, given: tuple[int, ...] | None, copies: int
) -> tuple[int, ...]:
    found = split(model, seq_len, stages, given, tensor=copies * model.num_kv_heads)
    return tuple(len(stage.layers) for stage in found)


def repeated_layers(layouts: Candidates, per_stage: Array) -> tuple[Array, Array, Array]:
    """How many layers of each stage are recomputed if any are, and whether its last one is, both [cases, stages]; and
    which case each layout is. As plan.stages.recomputed_layers has them, counted."""
    first, case = distinct(layouts.recompute_every)
    if layouts.recompute_layers is not None:
        counts = np.minimum(per_stage, np.array(layouts.recompute_layers))[None]
        return counts, (counts == per_stage) & (counts > 0), case
    every, stops = layouts.recompute_every[first][:, None], np.cumsum(per_stage)
    counts = -(-stops // every) - -(-(stops - per_stage) // every)
    return counts, (per_stage > 0) & ((stops - 1) % every == 0), case


def _thresholds(model: ModelSpec, stages: int) -> Array:
    """nanotron's rule: blocks in order, a stage closes once the cost so far reaches its share of the whole; cost counts
    parameters of matrices, the head included. Early stages thus get more than their share."""
    layer = 2 * model.hidden * (model.q_rows + model.kv_rows) + (3 if model.gated else 2) * model.hidden * model.ffn
    total = model.num_layers * layer + model.hidden * model.vocab
    counts, stage = np.zeros(stages, dtype=int), 0
    for number in range(model.num_layers):
        counts[stage] += 1
        if (number + 1) * layer * stages >= total * (stage + 1) and stage + 1 < stages:
            stage += 1
    return counts


def estimate(
    model: ModelSpec, job: JobSpec, cluster: ClusterSpec, engine: Engine, layouts: Candidates
) -> Iterator[Group]:
    """Price every layout, in groups. Layouts must be legal."""
    for footprint in footprints(model, job, cluster, engine, layouts):
        yield price(model, job, cluster, engine, footprint)


def footprints(
    model: ModelSpec, job: JobSpec, cluster: ClusterSpec, engine: Engine, layouts: Candidates
) -> Iterator[Footprint]:
    """Memory of every layout, in groups. Layouts must be legal."""
    if not len(layouts):
        return
    engine = engine.on(cluster.device)
    priced = costs(model, job, cluster, engine, layouts)
    keys = layouts.pipeline * (model.num_layers + 1) + layouts.virtual_stages
    # Copied kv heads make layers dearer, so the balance of stages may differ.
    copies = np.maximum(1, layouts.tensor // model.num_kv_heads)
    keys = keys * (int(copies.max()) + 1) + copies
    keys = keys * len(layouts.schedules) + np.array(_placements(layouts.schedules))[layouts.schedule]
    order = np.argsort(keys, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        yield _footprint(model, job, engine, layouts.take(rows), priced.take(rows), rows)


def _placements(schedules: tuple[str, ...]) -> list[int]:
    """For each schedule, the first that puts stages where it does."""
    rules = [SCHEDULES[name].placement for name in schedules]
    return [rules.index(rule) for rule in rules]


def _footprint(
    model: ModelSpec, job: JobSpec, engine: Engine, layouts: Candidates, priced: Costs, rows: Array
) -> Footprint:
    name = layouts.schedules[int(layouts.schedule[0])]
    places = timeline.stage_places(name, int(layouts.pipeline[0]), int(layouts.virtual_stages[0]))
    per_stage = stage_layers(model, job.seq_len, engine, layouts)
    repeated, closing, case = repeated_layers(layouts, per_stage)
    repeated, closing = repeated[:, places], closing[:, places]
    layers, ends = per_stage[places], (0, int(np.argmax((places == len(per_stage) - 1).any(0))))
    held = memory.held_elements(model, layouts, layers, ends)
    counts = layouts.num_micro_batches(job.global_batch)
    chunk = memory.chunk_bytes(priced, layers, repeated, closing, case)
    by_kind = memory.memory(engine, job.precision, layouts, held, priced, layers, chunk, counts, ends)
    return Footprint(
        rows=rows,
        layouts=layouts,
        places=places,
        layers=layers,
        repeated=repeated,
        closing=closing,
        case=case,
        costs=priced,
        held=held,
        memory=by_kind,
        tied=memory.tied_elements(model, layouts, layers.shape[1], ends),
    )


def _transfer_s(
    cluster: ClusterSpec, engine: Engine, layouts: Candidates, links: dict[str, network.Placement], size: Array
) -> Array:
    """Seconds of handing `size` bytes to the next stage. Tensor ranks that hold the same may send a part each, which
    the receivers gather inside their node (SC21, arXiv 2104.04473, section 4.1)."""
    if not engine.scatter_boundary:
        return np.asarray(network.point_to_point_s(cluster, size, links["pipeline"]))
    parts = np.where(layouts.sequence_parallel, 1, layouts.tensor)
    gathered = (parts > 1) & (layouts.pipeline > 1)
    gather_s = np.where(gathered, network.collective_s(cluster, "all_gather", size, links["tensor"]), 0.0)
    return np.asarray(network.point_to_point_s(cluster, size / parts, links["pipeline"]) + gather_s)


def price(model: ModelSpec, job: JobSpec, cluster: ClusterSpec, engine: Engine, footprint: Footprint) -> Group:
    """Seconds of every layout of one footprint."""
    layouts, priced, places = footprint.layouts, footprint.costs, footprint.places
    num_micro_batches = layouts.num_micro_batches(job.global_batch)
    per_stage = np.empty(places.size)
    per_stage[places] = footprint.layers
    repeated = np.empty((len(footprint.repeated), places.size))
    repeated[:, places] = footprint.repeated
    links = network.placements(cluster, layouts)
    layer = memory.elements(model, layouts).layer
    gathers = data_axis.gathers(cluster, engine, job.precision, layouts, links["shards"], layer)
    transfer_s = _transfer_s(cluster, engine, layouts, links, priced.at(priced.boundary_bytes))
    waited = engine.blocking_transfers if layouts.overlap else 1.0
    again = repeated[footprint.case]
    times = timeline.stage_times(priced, per_stage, again, gathers, transfer_s, engine, waited)
    pipeline_s = np.empty(len(layouts))
    rules = np.array([timeline.bound_rule(name) for name in layouts.schedules])[layouts.schedule]
    for first in distinct(rules)[0]:
        rows, name = np.flatnonzero(rules == rules[first]), layouts.schedules[layouts.schedule[first]]
        pipeline_s[rows] = timeline.bound(name, times.take(rows), places, num_micro_batches[rows])
    windows = (timeline.by_coordinate(seconds, places) for seconds in (times.backward_s, times.forward_s))
    tail = data_axis.tail(cluster, engine, job.precision, footprint, links, num_micro_batches, *windows)
    # A later coordinate ends its last backward earlier than the first: that much of its tail costs nothing.
    hops = np.arange(places.shape[1], dtype=float) * times.transfer_s[:, None]
    first_s = times.backward_s.take(places[0], axis=1)
    slack = np.cumsum(first_s, 1) - first_s + hops
    tail_s = np.maximum(0.0, (tail.exposed_s + tail.optimizer_s - slack).max(1)) + engine.host_step_s
    return Group(
        footprint=footprint,
        times=times,
        gathers=gathers,
        waits_s=np.asarray(waited * transfer_s),
        pipeline_s=pipeline_s,
        tail=tail,
        tail_s=tail_s,
        step_s=engine.factor * (pipeline_s + tail_s),
    )
