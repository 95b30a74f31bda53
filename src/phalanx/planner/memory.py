"""Bytes per rank by kind, for every pipeline coordinate of many layouts at once.

Element counts equal Shards to the last padded element (tests hold them equal); activation bytes come from Operations,
the micro-batches in flight from what each schedule holds (docs/equations.md, 12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.plan.cut import Cut, expert_spread
from phalanx.plan.operations import Block
from phalanx.plan.reduction import WITH_ERRORS
from phalanx.plan.schedule import SCHEDULES
from phalanx.plan.shards import ALIGNMENT, VOCAB_MULTIPLE
from phalanx.planner.candidates import RECOMPUTES, Array, Candidates, distinct
from phalanx.planner.engine import Engine
from phalanx.spec.model import ModelSpec

if TYPE_CHECKING:
    from phalanx.planner.costs import Costs

KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "buffers", "overhead")

NONE, SELECTIVE, FULL = (RECOMPUTES.index(kind) for kind in ("none", "selective", "full"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Elements of one rank's buffers, padding included: of a layer (of which `experts`), the embedding, the head."""

    layer: Any
    experts: Any
    embedding: Any
    head: Any


def _padded(part: Any, data: Any) -> Any:
    multiple = data * ALIGNMENT
    return -(-part // multiple) * multiple


def elements(model: ModelSpec, layout: Any) -> Elements:
    """What `plan.shards.stage_buffers` lays out, counted: each part padded to a multiple of data × ALIGNMENT."""
    tensor, data, h = np.asarray(layout.tensor), layout.data, model.hidden
    q, f = model.q_rows // tensor, model.ffn // tensor
    copied = tensor > model.num_kv_heads
    kv = np.where(copied, model.head_dim, model.kv_rows // tensor)
    ups = 2 if model.gated else 1
    own_kv, copied_kv = np.where(copied, 0, 2 * kv), np.where(copied, 2 * kv, 0)
    norms = model.num_norm_parameters
    up_bias = ups * f if model.bias else 0 * f
    # Experts lie spread over the data axis as far as they divide (plan.cut).
    spread = expert_spread(model, layout)
    local = model.num_experts // spread if model.num_experts else 1
    parts = (
        2 * q * h + own_kv * h + (ups + 1) * f * h * local + model.num_experts * h,
        copied_kv * h,
        (q + own_kv if model.qkv_bias else 0 * q) + up_bias,
        2 * norms + (2 * h if model.bias else 0),
        copied_kv if model.qkv_bias else 0 * q,
        2 * model.head_dim if model.qk_norm else 0 * q,
    )
    rows = -(-model.vocab // (VOCAB_MULTIPLE * tensor)) * VOCAB_MULTIPLE
    positions = model.max_seq_len * h if model.positions == "learned" else 0
    own_head = rows * h if not model.tied else np.where(np.asarray(layout.pipeline) > 1, rows * h, 0)
    return Elements(
        layer=sum(_padded(part, data) for part in parts),
        experts=(ups + 1) * f * h * local if model.num_experts else 0 * f,
        embedding=_padded(rows * h, data) + _padded(positions, data),
        head=_padded(norms, data) + _padded(own_head, data),
    )


def in_flight(name: str, pipeline: int, virtual_stages: int, num_micro_batches: Array) -> Array:
    """The most micro-batches that each coordinate holds, in units of one chunk: [layouts, coordinates].

    The schedule's own stated bound, which its checker holds it to.
    """
    first, inverse = distinct(num_micro_batches)
    peak, different = SCHEDULES[name].peak_live, num_micro_batches[first].tolist()
    table = [[peak(pipeline, virtual_stages, count, at) for at in range(pipeline)] for count in different]
    return np.array(table)[inverse]


def kept_bytes(block: Block, cut: Cut, recompute: Array) -> tuple[Any, Any]:
    """Per layer and micro-batch: bytes kept from forward to backward, and the working set while recomputing."""
    everything = block.kept_bytes
    core = sum(kept.bytes for kept in block.kept if kept.again)
    checkpoint = cut.rows * cut.hidden * cut.element
    kept = np.where(recompute == FULL, checkpoint, np.where(recompute == SELECTIVE, everything - core, everything))
    working = np.where(recompute == FULL, everything, np.where(recompute == SELECTIVE, core, 0))
    return kept, working


def chunk_bytes(costs: Costs, layers: Array, repeated: Array, closing: Array, case: Array) -> tuple[Array, Array]:
    """What the fullest chunk of each coordinate keeps of one micro-batch, and what the layer needs beyond it that is
    being recomputed, [layouts, coordinates]. `repeated` [cases, chunks, coordinates]: how many of `layers` [chunks,
    coordinates] are, in the `case` of each layout; `closing`: whether the last of them is. A layer that is not, behind
    the last one that is, has left more than that one needs."""
    kept, plain = (_column(costs.at(each)) for each in (costs.kept_bytes, costs.kept_bytes_plain))
    largest = layers.max(0).astype(float) * kept
    for number, again in enumerate(repeated):
        if (again != layers).any():
            rows = case == number
            largest[rows] = (again * kept[rows, None] + (layers - again) * plain[rows, None]).max(1)
    return largest, closing.max(1)[case] * _column(costs.at(costs.working_bytes))


def memory(
    engine: Engine,
    precision: str,
    layouts: Candidates,
    held: Held,
    costs: Costs,
    layers: Array,
    chunk: tuple[Array, Array],
    num_micro_batches: Array,
    ends: tuple[int, int],
) -> dict[str, Array]:
    """Bytes by kind, each [layouts, coordinates], of layouts that share pipeline size and places of stages.

    `layers` [chunks, coordinates]: layers of each chunk; `chunk`: its activations, as `chunk_bytes` has them; `ends`:
    coordinates that hold the first and the last stage.
    """
    pipeline = layers.shape[1]
    last = np.arange(pipeline) == ends[1]
    states = engine.states_for(precision)
    shards, zero = _column(layouts.data * layouts.context), _column(layouts.zero)
    flight = np.empty((len(layouts), pipeline))
    for number in layouts.schedule[distinct(layouts.schedule)[0]]:
        rows = layouts.schedule == number
        flight[rows] = in_flight(layouts.schedules[number], pipeline, len(layers), num_micro_batches[rows])
    boundary = _column(costs.at(costs.boundary_bytes))
    loss_bytes = np.where(_column(layouts.tensor) > 1, engine.sharded_loss_bytes, engine.loss_bytes)
    logits = last * (_column(costs.at(costs.logits)) * loss_bytes + 2 * boundary)
    # Backward ends with all gradients of a chunk, and has freed its logits and activations by then.
    passing = held.elements * states.transient / len(layers)
    transient = np.maximum(0.0, passing - chunk[0] - logits) if states.transient else 0.0
    unit = held.elements / np.maximum(1, layers.sum(0))
    copies = 2 if layouts.reduce in WITH_ERRORS else 1  # an error beside each gradient
    by_kind = {
        "parameters": np.where(zero >= 3, held.shard, held.elements) * states.parameter,
        "gradients": np.where(zero >= 2, held.shard, held.elements) * states.gradient * copies + transient,
        "optimizer": np.where(zero >= 1, held.shard, held.elements) * states.optimizer,
        "activations": flight * chunk[0] + chunk[1],
        "logits": logits,
        "gathered": np.where(zero >= 3, 2 * unit * min(2.0, states.parameter), 0.0),
        "buffers": (4 * boundary if pipeline > 1 else 0)
        + np.where(shards > 1, 2.0 * layouts.bucket_bytes, 0.0)
        + np.where((zero >= 2) & (shards > 1), engine.whole_gradients * unit * states.gradient, 0.0),
    }
    if engine.whole_gather:
        by_kind["gathered"] += ((zero >= 1) & (zero <= 2) & (shards > 1)) * held.elements * states.parameter
    if states.bucket:
        by_kind["buffers"] += ((zero == 0) & (shards > 1)) * held.elements * states.bucket
    if engine.whole_buffers or engine.run_ahead:
        size = np.where(layouts.sequence_parallel, layouts.tensor, 0) * (layouts.tensor > 1)
        by_kind["buffers"] += (engine.whole_buffers + engine.run_ahead) * boundary * _column(size)
    by_kind["overhead"] = sum(by_kind.values()) * (engine.fragmentation - 1.0) + engine.context_bytes
    return by_kind


def least(model: ModelSpec, engine: Engine, precision: str, layouts: Candidates) -> Array:
    """Bytes that the fullest rank needs at least: the mean over the pipeline of its model states, activations left out.
    What exceeds the device already here cannot fit."""
    first, inverse = distinct(
        layouts.tensor,
        layouts.context,
        layouts.pipeline,
        layouts.data,
        layouts.zero,
        layouts.zero_group,
        layouts.expert_group,
    )
    return _least(model, engine, precision, layouts.take(first))[inverse]


def _least(model: ModelSpec, engine: Engine, precision: str, layouts: Candidates) -> Array:
    count, states = elements(model, layouts), engine.states_for(precision)
    total = model.num_layers * count.layer + count.embedding + count.head
    mean = total / layouts.pipeline
    shard = mean / (layouts.shard_group * layouts.context)  # experts, cut over their copies only, need more
    return np.asarray(
        np.where(layouts.zero >= 3, shard, mean) * states.parameter
        + np.where(layouts.zero >= 2, shard, mean) * states.gradient
        + np.where(layouts.zero >= 1, shard, mean) * states.optimizer
        + engine.context_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Elements of parameters on each coordinate, [layouts, coordinates]: all of them, those of `experts`, and the
    `shard` that one rank owns where they are cut over the data axis (experts over their copies only); and over how many
    data ranks experts lie, [layouts]."""

    elements: Array
    experts: Array
    shard: Array
    spread: Array

    def take(self, index: Array) -> Held:
        """The layouts at `index`."""
        return Held(
            elements=self.elements[index],
            experts=self.experts[index],
            shard=self.shard[index],
            spread=self.spread[index],
        )


def held_elements(model: ModelSpec, layouts: Candidates, layers: Array, ends: tuple[int, int]) -> Held:
    """What each coordinate holds; `ends` hold the embedding and the head."""
    count = elements(model, layouts)
    layer, embedding, head = (_column(each).astype(float) for each in (count.layer, count.embedding, count.head))
    parts: Array = layers.sum(0).astype(float) * layer  # as floats, which hold such whole numbers exactly
    parts[:, ends[0] : ends[0] + 1] += embedding
    parts[:, ends[1] : ends[1] + 1] += head
    group = layouts.shard_group
    if not model.num_experts:
        shard = parts / _column(group * layouts.context).astype(float)
        return Held(elements=parts, experts=np.zeros_like(parts), shard=shard, spread=np.ones_like(layouts.data))
    experts = layers.sum(0) * _column(count.experts)
    spread = np.asarray(expert_spread(model, layouts))
    sharing = group * layouts.context, np.minimum(layouts.data // spread, group) * layouts.context
    shard = (parts - experts) / _column(sharing[0]) + experts / _column(sharing[1])
    return Held(elements=parts, experts=np.asarray(experts), shard=np.asarray(shard), spread=spread)


def tied_elements(model: ModelSpec, layouts: Candidates, pipeline: int, ends: tuple[int, int]) -> Array:
    """Elements of a tied embedding on each coordinate that shares it with another, [layouts, coordinates]."""
    rows = -(-model.vocab // (VOCAB_MULTIPLE * layouts.tensor)) * VOCAB_MULTIPLE
    holders = np.isin(np.arange(pipeline), ends) & (model.tied and ends[0] != ends[1])
    return np.asarray(_column(rows * model.hidden) * holders)


def _column(values: Any) -> Any:
    """[layouts] as [layouts, 1], so that it meets [coordinates]."""
    return np.asarray(values)[..., None]
