"""Candidates: many layouts as one array per field, so that a cost is computed for all of them at once.

Attribute names are Layout's; wherever a formula reads `layout.tensor`, a Layout and a Candidates both do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from phalanx.plan.layout import Layout, Outermost, Recompute, Reduce
from phalanx.plan.schedule import SCHEDULES
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

Array: TypeAlias = npt.NDArray[Any]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
OUTERMOST: tuple[Outermost, ...] = ("pipeline", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be chosen: the values of each discrete option that an engine can run. Axis sizes, micro-batches and
    virtual stages follow from the devices, the batch and the layers.

    `recompute_every` is for full recompute; `zero_in_node`: whether ZeRO 3 may also cut within a node alone.
    """

    schedules: tuple[str, ...] = ("1f1b", "gpipe")
    zero: tuple[int, ...] = (0, 1)
    recompute: tuple[Recompute, ...] = ("none",)
    recompute_every: tuple[int, ...] = (1,)
    zero_in_node: bool = False
    sequence_parallel: tuple[bool, ...] = (False, True)
    max_context: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """One entry per layout in each array. `schedule` indexes `schedules`, `recompute` indexes RECOMPUTES and
    `outermost` OUTERMOST."""

    tensor: Array
    context: Array
    pipeline: Array
    data: Array
    virtual_stages: Array
    micro_batch: Array
    schedule: Array
    zero: Array
    sequence_parallel: Array
    recompute: Array
    zero_group: Array
    recompute_every: Array
    expert_group: Array
    outermost: Array
    tensor_overlap_chunks: Array
    schedules: tuple[str, ...]
    bucket_bytes: int = Layout().bucket_bytes
    reduce: Reduce = "fp32"
    reduce_rank: int = 4
    reduce_fraction: float = 0.01
    overlap: bool = True
    recompute_layers: tuple[int, ...] | None = None
    stage_layers: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_stages(self) -> Array:
        """Stages that a micro-batch passes through."""
        return self.pipeline * self.virtual_stages

    @property
    def num_shards(self) -> Array:
        """Neighbouring data ranks that each own a part of what ZeRO cuts; 1 without ZeRO."""
        return np.where(self.zero >= 1, self.shard_group, 1)

    @property
    def shard_group(self) -> Array:
        """Neighbouring data ranks within which ZeRO would cut."""
        return np.where(self.zero_group > 0, self.zero_group, self.data)

    def stride(self, axis: str) -> Array:
        """How far the ranks of neighbours on `axis` lie apart."""
        if axis == "tensor":
            return np.ones_like(self.tensor)
        cell = self.tensor * self.context
        if axis == "context":
            return self.tensor
        inside = {"pipeline": self.data, "data": self.pipeline}[axis]
        return cell * np.where(self.outermost == OUTERMOST.index(axis), inside, 1)

    def num_micro_batches(self, global_batch: int) -> Array:
        """Micro-batches that each data coordinate runs per step."""
        return global_batch // (self.micro_batch * self.data)

    def take(self, index: Array) -> Candidates:
        """Those at `index`, numbers."""
        arrays = {name: getattr(self, name).take(index) for name in ARRAYS}
        return Candidates(**arrays, schedules=self.schedules, **_shared(self))

    def joined(self, others: Candidates) -> Candidates:
        """These, and others after them, which share all that is no array."""
        arrays: dict[str, Any] = {name: np.append(getattr(self, name), getattr(others, name)) for name in ARRAYS}
        return Candidates(**arrays, schedules=self.schedules, **_shared(self))

    def layout(self, i: int) -> Layout:
        """The i-th as a Layout."""
        return Layout(
            tensor=int(self.tensor[i]),
            context=int(self.context[i]),
            pipeline=int(self.pipeline[i]),
            data=int(self.data[i]),
            virtual_stages=int(self.virtual_stages[i]),
            micro_batch=int(self.micro_batch[i]),
            schedule=self.schedules[self.schedule[i]],
            zero=int(self.zero[i]),
            sequence_parallel=bool(self.sequence_parallel[i]),
            recompute=RECOMPUTES[self.recompute[i]],
            zero_group=int(self.zero_group[i]),
            recompute_every=int(self.recompute_every[i]),
            expert_group=int(self.expert_group[i]),
            outermost=OUTERMOST[self.outermost[i]],
            tensor_overlap_chunks=int(self.tensor_overlap_chunks[i]),
            **_shared(self),
        )


ARRAYS = tuple(field.name for field in fields(Candidates))[:15]
SHARED = tuple(field.name for field in fields(Candidates))[16:]


def _shared(layouts: Candidates | Layout) -> dict[str, Any]:
    """What all layouts of one Candidates have in common."""
    return {name: getattr(layouts, name) for name in SHARED}


def of(layouts: Sequence[Layout]) -> Candidates:
    """Layouts as arrays. All share the options in SHARED of the first."""
    schedules = tuple(dict.fromkeys(layout.schedule for layout in layouts))
    columns: dict[str, Any] = {name: np.array([getattr(layout, name) for layout in layouts]) for name in ARRAYS[:6]}
    columns["schedule"] = np.array([schedules.index(layout.schedule) for layout in layouts])
    for name in ("zero", "sequence_parallel", *ARRAYS[10:13], "tensor_overlap_chunks"):
        columns[name] = np.array([getattr(layout, name) for layout in layouts])
    columns["recompute"] = np.array([RECOMPUTES.index(layout.recompute) for layout in layouts])
    columns["outermost"] = np.array([OUTERMOST.index(layout.outermost) for layout in layouts])
    return Candidates(**columns, schedules=schedules, **_shared(layouts[0]))


MOST_KEYS = 2**22
"""Combinations for which a table of all of them is kept for a moment."""


def distinct(*columns: Array) -> tuple[Array, Array]:
    """Places of the first of each distinct combination of `columns` (whole numbers, not negative), and for every entry
    which combination it has."""
    key, num_keys = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        key, num_keys = key * size + column, num_keys * size
    if num_keys > MOST_KEYS:
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        return first, inverse
    place = np.full(num_keys, -1)  # without sorting: several times as fast
    place[key[::-1]] = np.arange(len(key))[::-1]
    first = place[place >= 0]
    place[place >= 0] = np.arange(len(first))
    return first, place[key]


def divisors(number: int) -> tuple[int, ...]:
    """All divisors in rising order."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return tuple(sorted({*small, *(number // i for i in small)}))


def enumerate_all(
    model: ModelSpec,
    job: JobSpec,
    cluster: ClusterSpec,
    space: Space,
    given: Mapping[str, Any],
    hopeless: Callable[[int, int], bool] = lambda tensor, num_ranks: False,
) -> tuple[Candidates, Array]:
    """Every way to use all devices of `cluster`: legal or not, but no two that mean the same; and for how many layouts
    each stands: one, but where its tensor size among so many ranks is `hopeless` all with the same axis sizes.

    Left out are only twins: ZeRO on one data rank, sequence parallelism on one tensor rank, the order of micro-batches
    where there is one stage. Keys in `given` keep their value.
    """
    names = tuple(dict.fromkeys(["1f1b", *space.schedules, str(given.get("schedule", "1f1b"))]))
    blocks, times = [np.empty((len(ARRAYS), 0), dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for sizes in _sizes(model, cluster.num_devices, space, given):
        orders = np.array([(v, names.index(name)) for name, v in _orders(model, sizes[2], space, given)])
        micro_batches = np.array(_given(given, "micro_batch", divisors(max(1, job.global_batch // sizes[3]))))
        choices = np.array(options(model, sizes, cluster, space, given))
        parts = orders, micro_batches, choices
        num_layouts = math.prod(map(len, parts))
        if hopeless(sizes[0], math.prod(sizes)):
            parts = orders[:1], micro_batches[:1], choices[:1]
        order, micro_batch, choice = (
            grid.reshape(-1) for grid in np.meshgrid(*(np.arange(len(part)) for part in parts), indexing="ij")
        )
        times.append(np.full(len(order), num_layouts // max(1, len(order))))
        block = np.empty((len(ARRAYS), len(order)), dtype=np.int64)
        block[:4] = np.array(sizes)[:, None]
        block[4], block[6] = orders[order].T
        block[5] = micro_batches[micro_batch]
        block[7:] = choices[choice].T
        blocks.append(block)
    columns: dict[str, Any] = dict(zip(ARRAYS, np.concatenate(blocks, axis=1), strict=True))
    columns["sequence_parallel"] = columns["sequence_parallel"].astype(bool)
    extra = {key: given[key] for key in SHARED if given.get(key) is not None}
    return Candidates(**columns, schedules=names, **extra), np.concatenate(times)


def _sizes(
    model: ModelSpec, num_devices: int, space: Space, given: Mapping[str, Any]
) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, context, pipeline, data) whose product is the number of devices."""
    tensors = _given(given, "tensor", [t for t in divisors(num_devices) if t <= model.num_heads])
    contexts = _given(given, "context", [c for c in divisors(num_devices) if c <= space.max_context])
    most = num_devices if given.get("stage_layers") is not None else model.num_layers
    pipelines = _given(given, "pipeline", [p for p in divisors(num_devices) if p <= most])
    for tensor, context, pipeline in itertools.product(tensors, contexts, pipelines):
        cell = tensor * context * pipeline
        if num_devices % cell == 0 or "data" in given:
            yield tensor, context, pipeline, int(given.get("data", num_devices // cell))


def _orders(model: ModelSpec, pipeline: int, space: Space, given: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Schedules with their virtual stages; one stage needs no choice."""
    chunks, name = given.get("virtual_stages"), given.get("schedule")
    found = [(known, v) for known in space.schedules for v in _chunks(model, known, pipeline)]
    if pipeline == 1:
        found = [("1f1b", 1)]
    kept = [(known, v) for known, v in found if name in (None, known) and chunks in (None, v)]
    return kept or [(str(name or "1f1b"), int(chunks or 1))]


def _chunks(model: ModelSpec, name: str, pipeline: int) -> range:
    """Virtual stages that the schedule can have, as long as there is a layer for each."""
    fewest, most = SCHEDULES[name].virtual_stages
    return range(fewest, min(most, max(1, model.num_layers // pipeline)) + 1)


def options(
    model: ModelSpec, sizes: tuple[int, int, int, int], cluster: ClusterSpec, space: Space, given: Mapping[str, Any]
) -> list[tuple[int, ...]]:
    """Values of ZeRO and what follows it in ARRAYS, for axes of these sizes."""
    tensor, context, pipeline, data = sizes
    per_node = cluster.devices_per_node
    within = per_node // (tensor * context)
    groups = (0, within) if space.zero_in_node and 1 < within < data and data % within == 0 else (0,)
    cuts = [
        (zero, group)
        for zero in _given(given, "zero", space.zero if data * context > 1 else (0,))
        for group in _given(given, "zero_group", groups if zero == 3 else (0,))
    ]
    repeats = [
        (RECOMPUTES.index(kind), every)
        for kind in _given(given, "recompute", space.recompute)
        for every in _given(given, "recompute_every", _every(kind, space, given))
    ]
    flags = _given(given, "sequence_parallel", space.sequence_parallel if tensor > 1 else (False,))
    # Beyond a node tokens travel slowly: experts over the ranks of one node are the other choice.
    inside = math.gcd(model.num_experts, math.gcd(data, max(1, within)))
    fewer = (0, inside) if 0 < inside < math.gcd(model.num_experts, data) else (0,)
    spreads = _given(given, "expert_group", fewer if model.num_experts else (0,))
    # Stages come closer where all of a pipeline lies within a node; elsewhere some neighbours are on two nodes anyway.
    cell = tensor * context * pipeline
    inside_node = pipeline > 1 and data > 1 and per_node % cell == 0 and per_node < cell * data
    orders = [OUTERMOST.index(axis) for axis in _given(given, "outermost", OUTERMOST[: 1 + inside_node])]
    chunks = int(given.get("tensor_overlap_chunks", 1))
    # A part of a node is what neighbours on the data axis share, which pipelines within a node are not.
    return [
        (zero, flag, kind, group, every, spread, order, chunks)
        for (zero, group), flag, (kind, every), spread, order in itertools.product(
            cuts, flags, repeats, spreads, orders
        )
        if not (order and group and given.get("zero_group") is None)
    ]


def _every(kind: str, space: Space, given: Mapping[str, Any]) -> tuple[int, ...]:
    return space.recompute_every if kind == "full" and given.get("recompute_layers") is None else (1,)


def _given(given: Mapping[str, Any], key: str, values: Iterable[Any]) -> list[Any]:
    return [given[key]] if given.get(key) is not None else list(values)
