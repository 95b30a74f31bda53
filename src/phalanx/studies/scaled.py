"""A plan small enough for this machine, that still cuts its model in the same ways; and what was changed."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from phalanx.plan.layout import AXES, Layout
from phalanx.plan.plan import Plan
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

MAX_RANKS = 8
MAX_PARAMETERS = 10_000_000
MAX_TOKENS = 4096
"""Of one step: one process runs them as one micro-batch."""


def scaled(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """`plan` with its sizes brought below the limits above, and at least two micro-batches per step; and the changes,
    each as "layout.data 64 → 2".

    What is kept: which axes are cut, schedule, ZeRO, sequence parallelism, tying, biases, dropout, how query heads
    share kv heads and tensor ranks copy them, layers that do not divide, a vocabulary that needs padding. Reductions
    that send a part of the gradients send them all.
    """
    layout = _layout(plan.layout)
    model = _model(plan, layout) if plan.model.num_parameters > MAX_PARAMETERS else _fitting(plan.model, layout)
    if layout.stage_layers and sum(layout.stage_layers) != model.num_layers:
        layout = replace(layout, stage_layers=None)
    job, layout = _job(plan.job, layout)
    layout = replace(layout, **_exact(layout, model))
    small = replace(plan, model=model, job=job, layout=layout, prediction=None)
    return small, tuple(_changes(plan, small))


def _layout(layout: Layout) -> Layout:
    """At most MAX_RANKS ranks: the largest axis is halved until it fits; one that cuts goes on cutting."""
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    while math.prod(sizes.values()) > MAX_RANKS:
        largest = max(sizes, key=lambda axis: sizes[axis])
        sizes[largest] = max(2, sizes[largest] // 2)
    return replace(
        layout,
        tensor=sizes["tensor"],
        context=sizes["context"],
        data=sizes["data"],
        pipeline=sizes["pipeline"],
        zero_group=_zero_group(layout, sizes["data"]),
        stage_layers=layout.stage_layers if sizes["pipeline"] == layout.pipeline else None,
    )


def _exact(layout: Layout, model: ModelSpec) -> dict[str, Any]:
    """What makes a reduction that sends a part of the gradients send them all: no process alone leaves any out."""
    match layout.reduce:
        case "powersgd":
            return {"reduce_rank": max(layout.reduce_rank, model.hidden)}
        case "top-k":
            return {"reduce_fraction": 1.0}
    return {}


def _zero_group(layout: Layout, data: int) -> int:
    """A group of at least two within a data axis that is cut to `data`, and at least two of them, as there were."""
    if not layout.zero_group or layout.num_shards == layout.data:
        return 0
    return max((size for size in range(2, min(layout.zero_group, data // 2) + 1) if data % size == 0), default=0)


def _fitting(model: ModelSpec, layout: Layout) -> ModelSpec:
    """A small model as it is, but with heads and feed-forward that the smaller tensor axis still divides."""
    if model.num_heads % layout.tensor == 0 and model.ffn % layout.tensor == 0 and _kv_fits(model, layout.tensor):
        return model
    num_heads, num_kv_heads = _heads(model, layout.tensor, layout.tensor)
    return replace(model, num_heads=num_heads, num_kv_heads=num_kv_heads, ffn=_multiple(model.ffn, layout.tensor))


def _kv_fits(model: ModelSpec, tensor: int) -> bool:
    return model.num_kv_heads % tensor == 0 or tensor % model.num_kv_heads == 0


def _model(plan: Plan, layout: Layout) -> ModelSpec:
    """A model of well under a million parameters per layer, of the same kind."""
    model = plan.model
    num_layers = min(model.num_layers, 2 * layout.num_stages)
    if model.num_layers % plan.layout.num_stages:
        num_layers = min(model.num_layers, num_layers + 1)
    num_heads, num_kv_heads = _heads(model, plan.layout.tensor, layout.tensor)
    return replace(
        model,
        num_layers=num_layers,
        hidden=min(model.hidden, 128),
        head_dim=min(model.head_dim, 32),
        ffn=_multiple(min(model.ffn, 384), layout.tensor),
        vocab=min(model.vocab, 1021),  # a prime: it needs padding, as the real one may
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )


def _heads(model: ModelSpec, tensor_before: int, tensor: int) -> tuple[int, int]:
    """Few heads and kv heads, which are copied over tensor ranks, shared by query heads, or neither, as before."""
    if tensor_before > model.num_kv_heads:
        num_kv_heads = max(size for size in range(1, tensor) if tensor % size == 0 and size <= model.num_kv_heads)
    else:
        num_kv_heads = _multiple(min(model.num_kv_heads, 2 * tensor), tensor)
    sharing = min(2, model.num_heads // model.num_kv_heads)
    return math.lcm(sharing * num_kv_heads, tensor), num_kv_heads


def _multiple(value: int, unit: int) -> int:
    """The largest multiple of `unit` up to `value`, but at least one."""
    return max(1, value // unit) * unit


def _job(job: JobSpec, layout: Layout) -> tuple[JobSpec, Layout]:
    """At most MAX_TOKENS per step, in at least two micro-batches per data rank."""
    seq_len = job.seq_len
    if max(job.global_batch, 2 * layout.data) * seq_len > MAX_TOKENS and seq_len > 128:
        seq_len = _multiple(128, layout.tensor * layout.context)
    most = max(2, MAX_TOKENS // (seq_len * layout.data))  # sequences per data rank
    micro_batch = min(layout.micro_batch, most // 2)
    num_micro_batches = min(layout.num_micro_batches(job.global_batch), most // micro_batch)
    if num_micro_batches < 2 and micro_batch > 1:
        micro_batch, num_micro_batches = micro_batch // 2, 2
    num_micro_batches = max(2, num_micro_batches)
    global_batch = num_micro_batches * micro_batch * layout.data
    tokens = micro_batch * seq_len // (layout.tensor if layout.sequence_parallel else 1)
    chunks = math.gcd(tokens, layout.tensor_overlap_chunks)
    layout = replace(layout, micro_batch=micro_batch, tensor_overlap_chunks=chunks)
    return replace(job, seq_len=seq_len, global_batch=global_batch), layout


def _changes(before: Plan, after: Plan) -> list[str]:
    """As "model.hidden 4,096 → 128"."""

    def shown(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else str(value)

    return [
        f"{part}.{field.name} {shown(old)} → {shown(new)}"
        for part in ("model", "job", "layout")
        for field in fields(getattr(before, part))
        if (old := getattr(getattr(before, part), field.name)) != (new := getattr(getattr(after, part), field.name))
    ]
