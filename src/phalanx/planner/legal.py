"""The rules of `plan.legality`, for many layouts at once; a test holds both equal. Users hear legality's own words."""

from __future__ import annotations

import numpy as np

from phalanx.plan.legality import allowed_tensor_sizes, engine_problems
from phalanx.plan.reduction import WITH_ERRORS
from phalanx.plan.schedule import SCHEDULES
from phalanx.planner.candidates import RECOMPUTES, Array, Candidates, distinct
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec


def illegal(model: ModelSpec, job: JobSpec, cluster: ClusterSpec, layouts: Candidates) -> dict[str, Array]:
    """For each rule, which layouts break it."""
    tensor, context = layouts.tensor, layouts.context
    ranks = tensor * context * layouts.pipeline * layouts.data
    cut = context * np.where(layouts.sequence_parallel, tensor, 1)
    fewest, most = _virtual_stages(layouts)
    stages = layouts.num_stages
    layers = layouts.stage_layers
    uneven = (
        stages > model.num_layers if layers is None else (stages != len(layers)) | (sum(layers) != model.num_layers)
    )
    too_long = model.positions == "learned" and job.seq_len > model.max_seq_len
    return {
        **tensor_rules(model, cluster, tensor, ranks),
        "context × tensor does not divide the sequence": (job.seq_len % cut > 0) | too_long,
        "stages that the layers do not fill": uneven,
        "virtual stages that the schedule does not run": (layouts.virtual_stages < fewest)
        | (layouts.virtual_stages > most),
        "chunks that do not divide a micro-batch's tokens": (tensor > 1)
        & (layouts.micro_batch * job.seq_len // cut % layouts.tensor_overlap_chunks > 0),
        "micro-batch × data does not divide the global batch": job.global_batch % (layouts.micro_batch * layouts.data)
        > 0,
        "zero_group that ZeRO cannot cut within": _wrong_group(layouts),
        "expert_group that experts and data do not share": (layouts.expert_group > 0)
        & (np.gcd(model.num_experts, layouts.data) % np.maximum(layouts.expert_group, 1) + (not model.num_experts) > 0),
        "reduction that keeps errors, beside fp16 or gradients that ZeRO cuts": (layouts.reduce in WITH_ERRORS)
        & (
            (job.precision == "fp16")
            | (layouts.zero >= 2)
            | ((layouts.zero == 1) & (layouts.num_shards < layouts.data))
        ),
        "recompute_every or recompute_layers that do not fit": _wrong_recompute(layouts),
        "more ranks than devices": ranks > cluster.num_devices,
    }


def tensor_rules(model: ModelSpec, cluster: ClusterSpec, tensor: Array, ranks: Array) -> dict[str, Array]:
    """The first of the rules: those for which axis sizes decide alone."""
    per_node = cluster.devices_per_node
    outside = (tensor > per_node) | ((per_node % tensor > 0) & (ranks > per_node))
    return {
        "tensor does not divide heads, feed-forward or vocabulary": ~np.isin(tensor, allowed_tensor_sizes(model)),
        "tensor group does not stay inside a node": outside,
    }


def cannot_run(layouts: Candidates) -> Array:
    """Which layouts the trainer cannot run, by the door that knows: asked once for each combination of options."""
    first, inverse = distinct(
        layouts.context > 1,
        layouts.zero,
        layouts.recompute,
        layouts.schedule,
        layouts.virtual_stages > 1,
        layouts.zero_group > 0,
        layouts.recompute_every > 1,
    )
    refused = np.array([bool(engine_problems(layouts.layout(int(i)))) for i in first], dtype=bool)
    return refused[inverse]


def _wrong_group(layouts: Candidates) -> Array:
    size = layouts.zero_group
    wrong = (layouts.zero == 0) | (size == 1) | (layouts.data % np.maximum(size, 1) > 0)
    return np.asarray((size > 0) & wrong)


def _wrong_recompute(layouts: Candidates) -> Array:
    every, per_stage = layouts.recompute_every, layouts.recompute_layers
    if per_stage is not None:
        nothing = layouts.recompute == RECOMPUTES.index("none")
        return np.asarray(nothing | (layouts.num_stages != len(per_stage)) | (every > 1))
    return np.asarray((layouts.recompute == RECOMPUTES.index("none")) & (every > 1))


def _virtual_stages(layouts: Candidates) -> tuple[Array, Array]:
    bounds = [SCHEDULES[name].virtual_stages if name in SCHEDULES else (1, 0) for name in layouts.schedules]
    fewest, most = np.array(bounds).T[:, layouts.schedule]
    return fewest, most
