"""Legality: why a layout cannot run, with the numbers and the nearest values that could; the one door for that.

Nothing is repaired in silence: a layout is legal as written, or every reason why it is not comes back at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from phalanx.errors import Problem
from phalanx.plan.layout import AXES, Layout, Outermost, Recompute, Reduce
from phalanx.plan.reduction import WITH_ERRORS
from phalanx.plan.schedule import SCHEDULES
from phalanx.plan.shards import padded_vocab
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.spec.schema import nearest


def problems(model: ModelSpec, job: JobSpec, cluster: ClusterSpec, layout: Layout) -> list[Problem]:
    """Every reason why `layout` cannot run this job; empty when it can. `where` names the key, as "layout.tensor".

    Accepted although they change nothing: sequence parallelism with tensor 1, ZeRO with data 1, devices left idle.
    """
    found = list(_ranges(layout))
    if not found:
        found += _tensor(model, layout)
        found += _sequence(model, job, layout)
        found += _stages(model.num_layers, layout)
        found += _recompute(layout)
        found += _zero_group(layout)
        found += _expert_group(model, layout)
        found += _reduction(job, layout)
        found += _batch(job, layout)
        found += _devices(cluster, layout)
    return found


def module_problems(
    job: JobSpec, layout: Layout, num_blocks: int | None = None, cuts: Collection[str] | None = None
) -> list[Problem]:
    """Every reason why `layout` cannot train a module of which no more is known than that it has `num_blocks` blocks,
    one after another, and that cuts of these kinds are made in it (phalanx.own.cuts); None: not even that."""
    found = list(_ranges(layout))
    if found:
        return found
    found += _cuts(layout, cuts)
    if num_blocks is not None:
        found += _stages(num_blocks, layout)
    elif layout.num_stages > 1:
        instead = 'prepare(…, blocks="model.layers"), the name of its list of blocks; or pipeline = 1'
        found.append(_problem("pipeline", "nothing says how the module is cut into stages", instead))
    if layout.recompute == "selective" or (layout.recompute == "full" and num_blocks is None):
        instead = 'recompute = "none"' if num_blocks is None else 'recompute = "full" or "none"'
        found.append(_problem("recompute", f'"{layout.recompute}" is not possible for this module', instead))
    if layout.recompute_every > 1 or layout.recompute_layers is not None:
        key = "recompute_every" if layout.recompute_every > 1 else "recompute_layers"
        found.append(_problem(key, "of a module, all blocks are recomputed or none", f"leave {key} out"))
    if job.compile:
        what, instead = (
            "of a module it is not known what torch.compile may fuse",
            "compile = false, or compile its parts",
        )
        found.append(Problem(what=what, where="job.compile", instead=instead))
    if job.checkpoint.init_from:
        what = f"a module brings its own weights, and does not take those of {job.checkpoint.init_from}"
        instead = "load them into it before prepare, as with phalanx.module_weights"
        found.append(Problem(what=what, where="job.checkpoint.init_from", instead=instead))
    return [*found, *_zero_group(layout), *_reduction(job, layout), *_batch(job, layout), *engine_problems(layout)]


def _cuts(layout: Layout, cuts: Collection[str] | None) -> Iterator[Problem]:
    if layout.tensor > 1 and cuts is None:
        instead = "tensor = 1, or prepare(…, cuts=…), a table that says how layers are cut"
        yield _problem("tensor", "nothing says how the module is cut over the tensor axis", instead)
    elif layout.sequence_parallel and layout.tensor > 1 and not {"sequence", "tokens"} <= set(cuts or ()):
        what = "the table of cuts does not say between which blocks tokens are cut, and what needs all of them"
        instead = 'sequence_parallel = false, or a line with "sequence" and one with "tokens"'
        yield _problem("sequence_parallel", what, instead)
    if layout.tensor_overlap_chunks > 1:
        instead = "tensor_overlap_chunks = 1"
        yield _problem("tensor_overlap_chunks", "of a module, products are not cut into chunks", instead)


def _problem(key: str, what: str, instead: str) -> Problem:
    return Problem(what=what, where=f"layout.{key}", instead=instead)


def _ranges(layout: Layout) -> Iterator[Problem]:
    """Values that are wrong on their own; the other checks divide by them."""
    for key in (
        *AXES,
        "micro_batch",
        "virtual_stages",
        "recompute_every",
        "bucket_bytes",
        "reduce_rank",
        "tensor_overlap_chunks",
    ):
        value = getattr(layout, key)
        if value < 1:
            yield _problem(key, f"{key} is {value}", f"{key} = 1 or more")
    if layout.zero not in range(4):
        yield _problem("zero", f"there is no ZeRO stage {layout.zero}", "zero = 0, 1, 2 or 3")
    if layout.zero_group < 0:
        yield _problem("zero_group", f"zero_group is {layout.zero_group}", "zero_group = 0 (all of data) or more")
    if layout.expert_group < 0:
        yield _problem(
            "expert_group", f"expert_group is {layout.expert_group}", "expert_group = 0 (all of data) or more"
        )
    names = {"reduce": Reduce, "recompute": Recompute, "outermost": Outermost}
    for key, known in [*((key, get_args(kind)) for key, kind in names.items()), ("schedule", tuple(SCHEDULES))]:
        if (name := getattr(layout, key)) not in known:
            instead = f'{key} = "{nearest(name, known) or known[0]}" (of {", ".join(known)})'
            yield _problem(key, f'there is no {key} "{name}"', instead)
    if not 0 < layout.reduce_fraction <= 1:
        what = f"reduce_fraction is {layout.reduce_fraction:g}"
        yield _problem("reduce_fraction", what, "reduce_fraction = above 0 and at most 1")
    for key in ("stage_layers", "recompute_layers"):
        counts = getattr(layout, key)
        if counts is not None and min(counts, default=0) < 0:
            yield _problem(key, f"a stage with {min(counts)} layers", "0 layers or more per stage")


def schedule_problems(layout: Layout) -> list[Problem]:
    """The reasons why there is no such schedule, whatever the model: its name, its sizes."""
    return list(_ranges(layout)) or list(_virtual_stages(layout))


def allowed_tensor_sizes(model: ModelSpec) -> tuple[int, ...]:
    """Every size of the tensor axis that this model can be cut into, 1 first."""
    return tuple(size for size in range(1, model.num_heads + 1) if not any(_indivisible(model, size)))


def _indivisible(model: ModelSpec, tensor: int) -> Iterator[str]:
    """What `tensor` does not cut evenly. Fewer kv heads than ranks are copied, if each gets as many copies."""
    if model.num_heads % tensor:
        yield f"tensor {tensor} does not divide {model.num_heads} query heads"
    if model.num_kv_heads % tensor and tensor % model.num_kv_heads:
        yield f"tensor {tensor} neither divides {model.num_kv_heads} kv heads nor is a multiple of them"
    if model.ffn % tensor:
        yield f"tensor {tensor} does not divide the feed-forward width {model.ffn}"
    rows = padded_vocab(model, tensor) // tensor
    if rows * (tensor - 1) >= model.vocab:
        yield f"tensor {tensor} leaves its last rank none of the {model.vocab} vocabulary rows ({rows} per rank)"


def _tensor(model: ModelSpec, layout: Layout) -> Iterator[Problem]:
    for what in _indivisible(model, layout.tensor):
        yield _problem("tensor", what, f"tensor = {_listed(allowed_tensor_sizes(model))}")


def _sequence(model: ModelSpec, job: JobSpec, layout: Layout) -> Iterator[Problem]:
    if job.seq_len % layout.context:
        nearest = _multiples_near(job.seq_len, layout.context)
        what = f"context {layout.context} does not divide sequence {job.seq_len}"
        yield _problem("context", what, f"job.seq_len = {nearest}")
    elif layout.sequence_parallel and job.seq_len % (layout.context * layout.tensor):
        nearest = _multiples_near(job.seq_len, layout.context * layout.tensor)
        cut = f"context {layout.context} × tensor {layout.tensor}" if layout.context > 1 else f"tensor {layout.tensor}"
        what = f"sequence parallelism cuts sequence {job.seq_len} over {cut}, which does not divide it"
        yield _problem("sequence_parallel", what, f"job.seq_len = {nearest}, or sequence_parallel = false")
    else:
        yield from _chunks(job, layout)
    if model.positions == "learned" and job.seq_len > model.max_seq_len:
        what = f"sequence {job.seq_len} is longer than the {model.max_seq_len} positions that {model.name} learns"
        yield Problem(what=what, where="job.seq_len", instead=f"seq_len = {model.max_seq_len} or less")


def _chunks(job: JobSpec, layout: Layout) -> Iterator[Problem]:
    tokens, chunks = layout.micro_batch * job.seq_len // layout.context, layout.tensor_overlap_chunks
    whose = "tokens of a micro-batch"
    if layout.sequence_parallel:
        tokens, whose = tokens // layout.tensor, "tokens of a micro-batch that a tensor rank holds"
    if layout.tensor > 1 and tokens % chunks:
        what = f"tensor_overlap_chunks {chunks} does not divide the {tokens} {whose}"
        yield _problem(
            "tensor_overlap_chunks", what, f"tensor_overlap_chunks = {_listed(_divisors_near(tokens, chunks))}"
        )


def _stages(num_layers: int, layout: Layout) -> Iterator[Problem]:
    yield from _virtual_stages(layout)
    stages = f"pipeline {layout.pipeline}"
    if layout.virtual_stages > 1:
        stages += f" × virtual stages {layout.virtual_stages} = {layout.num_stages} stages"
    if layout.stage_layers is None:
        if layout.num_stages > num_layers:
            most = num_layers // layout.virtual_stages
            instead = f"pipeline = {most} or less" if most else f"virtual_stages = {num_layers} or less"
            instead += ", or stage_layers with a 0 for each stage that shall hold only embedding or head"
            yield _problem("pipeline", f"{stages} for {num_layers} layers", instead)
        return
    if len(layout.stage_layers) != layout.num_stages:
        what = f"stage_layers has {len(layout.stage_layers)} entries, {stages}"
        yield _problem("stage_layers", what, f"{layout.num_stages} entries that sum to {num_layers}")
    if sum(layout.stage_layers) != num_layers:
        what = f"stage_layers sum to {sum(layout.stage_layers)}, the model has {num_layers} layers"
        yield _problem("stage_layers", what, f"entries that sum to {num_layers}, or leave it out")


def _recompute(layout: Layout) -> Iterator[Problem]:
    every, per_stage = layout.recompute_every, layout.recompute_layers
    key = "recompute_layers" if per_stage is not None else "recompute_every"
    if layout.recompute == "none" and (every > 1 or per_stage is not None):
        what = f"{key} with nothing to compute again: recompute is none"
        yield _problem(key, what, f'recompute = "selective" or "full", or leave {key} out')
    if per_stage is None:
        return
    if every > 1:
        what = f"recompute_every = {every} beside recompute_layers: both say which layers"
        yield _problem(key, what, "leave one of them out")
    if len(per_stage) != layout.num_stages:
        what = f"recompute_layers has {len(per_stage)} entries, the layout {layout.num_stages} stages"
        yield _problem(key, what, f"{layout.num_stages} entries")


def _virtual_stages(layout: Layout) -> Iterator[Problem]:
    fewest, most = SCHEDULES[layout.schedule].virtual_stages
    if not fewest <= layout.virtual_stages <= most:
        legal = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        others = [
            f'"{name}"'
            for name, family in SCHEDULES.items()
            if family.virtual_stages[0] <= layout.virtual_stages <= family.virtual_stages[1]
        ]
        instead = f"virtual_stages = {legal}"
        instead += f", or schedule = {_listed(others)}" if others else ""
        plural = "s" if layout.virtual_stages > 1 else ""
        what = f"schedule {layout.schedule} does not run with {layout.virtual_stages} virtual stage{plural}"
        yield _problem("virtual_stages", what, instead)


def _zero_group(layout: Layout) -> Iterator[Problem]:
    size, data = layout.zero_group, layout.data
    if size and not layout.zero:
        what = f"zero_group {size} without ZeRO, which is what it would bound"
        yield _problem("zero_group", what, "zero = 1, 2 or 3, or leave zero_group out")
    elif size and data % size:
        near = [divisor for divisor in _divisors_near(data, size) if divisor > 1]
        instead = f"zero_group = {_listed(near)}" if near else "leave zero_group out"
        yield _problem("zero_group", f"zero_group {size} does not divide data {data}", instead)
    elif size == 1:
        yield _problem("zero_group", "a zero_group of 1 shares nothing", "zero = 0, or zero_group = 2 or more")


def _expert_group(model: ModelSpec, layout: Layout) -> Iterator[Problem]:
    size = layout.expert_group
    if size and not model.num_experts:
        yield _problem(
            "expert_group", f"{model.name} has no experts to lie over {size} ranks", "leave expert_group out"
        )
    elif size and math.gcd(layout.data, model.num_experts) % size:
        what = f"expert_group {size} does not divide data {layout.data} and {model.num_experts} experts"
        near = _listed(_divisors_near(math.gcd(layout.data, model.num_experts), size))
        yield _problem("expert_group", what, f"expert_group = {near}")


def _reduction(job: JobSpec, layout: Layout) -> Iterator[Problem]:
    """What sends a part of the gradients needs them whole, and keeps an error as large as they are on each rank."""
    if layout.reduce not in WITH_ERRORS:
        return
    if job.precision == "fp16":
        what = f"{layout.reduce} keeps errors from step to step, between which fp16 changes the loss scale"
        yield _problem("reduce", what, 'reduce = "fp32", "bf16" or "fp16", or job.precision = "bf16"')
    elif layout.zero >= 2:
        what = (
            f"{layout.reduce} keeps errors as large as all gradients on every rank, which zero {layout.zero} is to save"
        )
        yield _problem("reduce", what, 'zero = 0 or 1, or reduce = "bf16"')
    elif layout.zero and layout.num_shards < layout.data:
        what = (
            f"{layout.reduce} needs gradients whole, which zero_group {layout.zero_group} cuts before they are reduced"
        )
        yield _problem("reduce", what, 'leave zero_group out, or reduce = "bf16"')


def _batch(job: JobSpec, layout: Layout) -> Iterator[Problem]:
    unit = layout.micro_batch * layout.data
    if job.global_batch % unit == 0:
        return
    instead = f"job.global_batch = {_multiples_near(job.global_batch, unit)}"
    if job.global_batch % layout.data:
        parts = job.global_batch // math.gcd(job.global_batch, layout.micro_batch)
        key, fitting = "data", _divisors_near(parts, layout.data)
    else:
        key, fitting = "micro_batch", _divisors_near(job.global_batch // layout.data, layout.micro_batch)
    cut = f"micro-batch {layout.micro_batch} × data {layout.data} = {unit}"
    what = f"{cut} does not divide global batch {job.global_batch}"
    yield _problem(key, what, f"{instead}, or {key} = {_listed(fitting)}")


def _devices(cluster: ClusterSpec, layout: Layout) -> Iterator[Problem]:
    per_node, tensor = cluster.devices_per_node, layout.tensor
    if layout.num_ranks > cluster.num_devices:
        axes = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, layout.sizes, strict=True) if size > 1)
        what = f"{axes} = {layout.num_ranks} ranks, {cluster.name} has {cluster.num_devices} devices"
        most = cluster.num_devices * layout.data // layout.num_ranks
        instead = f"data = {most} or less" if most else f"axis sizes whose product is {cluster.num_devices} or less"
        yield _problem("data" if most else "tensor", what, instead)
    if tensor > per_node or (per_node % tensor and layout.num_ranks > per_node):
        inside = [size for size in range(1, per_node + 1) if per_node % size == 0]
        what = f"a tensor group of {tensor} does not stay inside a node of {per_node} devices"
        yield _problem("tensor", what, f"tensor = {_listed(inside)}")


SPLIT_BACKWARD = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules with actions of their own for weight gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Something that a layout may say, and a planner may rank, but the trainer cannot run."""

    key: str
    beyond: Callable[[Layout], bool]
    what: str
    instead: str


LIMITS = (
    Limit(
        key="context",
        beyond=lambda layout: layout.context > 1,
        what="the trainer does not cut along the context axis",
        instead="context = 1",
    ),
    Limit(
        key="zero",
        beyond=lambda layout: layout.zero >= 2 and layout.schedule in SPLIT_BACKWARD,
        what="gradients that are cut after every backward cannot wait for weight-gradient actions",
        instead="zero = 1, or a schedule that does not split backward",
    ),
)
"""Each line goes when the trainer can do it."""


def engine_problems(layout: Layout) -> list[Problem]:
    """What the trainer cannot run of a layout that is legal otherwise."""
    return [_problem(limit.key, limit.what, limit.instead) for limit in LIMITS if limit.beyond(layout)]


def _listed(values: Sequence[object]) -> str:
    """As "1", "1 or 2", "1, 2 or 6"."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _multiples_near(value: int, unit: int) -> str:
    """The multiples of `unit` just below (0 left out) and just above `value`."""
    below = value // unit * unit
    return _listed([near for near in (below, below + unit) if near])


def _divisors_near(number: int, value: int) -> list[int]:
    """The divisors of `number` just below and just above `value`."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = [divisor for divisor in divisors if divisor <= value][-1:]
    return below + [divisor for divisor in divisors if divisor > value][:1]
