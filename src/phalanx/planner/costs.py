"""Costs: seconds of each part of a step for many layouts at once: a layer, the embedding, the head, messages, the tail.

Everything here is per rank and micro-batch unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.plan import operations
from phalanx.plan.cut import Cut, cut_of
from phalanx.plan.operations import Block
from phalanx.planner import compute, memory, network
from phalanx.planner.candidates import Array, Candidates, distinct
from phalanx.planner.engine import Engine
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of an activation: matrix products in fp8 still read and write 16-bit tensors between them."""


HALF_BLOCKS = (("qkv", "out"), ("up", "down"))
"""Products that open and close each half-block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Seconds of one block's forward or backward: arithmetic and memory, waiting for the tensor axis, and what of it is
    the repeated forward. `total_s` is at least what the host needs to issue it."""

    compute_s: Any
    tensor_s: Any
    recompute_s: Any
    total_s: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Forward and backward of a layer, the embedding and the head; bytes kept per layer and while recomputing, and of
    layers that are left out of that (`plain`); bytes between stages; tokens and vocabulary rows whose logits exist at a
    time. Numbers, or arrays with one entry per distinct price; `which` of them each layout has."""

    layer_forward: Pass
    layer_backward: Pass
    layer_backward_plain: Pass
    layer_weight_s: Any
    embedding_forward: Pass
    embedding_backward: Pass
    head_forward: Pass
    head_backward: Pass
    kept_bytes: Any
    kept_bytes_plain: Any
    working_bytes: Any
    boundary_bytes: Any
    logits: Any
    which: Array

    def take(self, index: Array) -> Costs:
        """The layouts at `index`."""
        return replace(self, which=self.which[index])

    def at(self, values: Any) -> Array:
        """One of the fields, or a part of one, with an entry per layout: floats, also where it is whole bytes."""
        if not np.ndim(values):
            return np.full(len(self.which), float(values))
        return np.asarray(values, dtype=float).take(self.which)


def costs(model: ModelSpec, job: JobSpec, cluster: ClusterSpec, engine: Engine, layouts: Candidates) -> Costs:
    """Price one micro-batch under every layout.

    Depends on the tensor and context axes, micro-batch, sequence parallelism and recompute only (under experts on the
    data axis too), so each combination is priced once.
    """
    columns = [layouts.tensor, layouts.context, layouts.micro_batch, layouts.sequence_parallel, layouts.recompute]
    columns += [layouts.tensor_overlap_chunks]
    if model.num_experts:
        columns += [layouts.data, layouts.expert_group, layouts.outermost, layouts.pipeline]
    first, inverse = distinct(*columns)
    some = layouts.recompute_layers is not None or bool(np.any(layouts.recompute_every > 1))
    return _priced(model, job, cluster, engine, layouts.take(first), inverse, some_recomputed=some)


def _priced(
    model: ModelSpec,
    job: JobSpec,
    cluster: ClusterSpec,
    engine: Engine,
    layouts: Candidates,
    which: Array,
    *,
    some_recomputed: bool,
) -> Costs:
    cut = cut_of(model, job.seq_len, layouts, ELEMENT_BYTES[job.precision], eight_bit=str(job.precision) == "fp8")
    layer = operations.layer(model, cut, engine.kernels)
    places = network.placements(cluster, layouts)
    price = _Pricer(cluster, job.precision, engine, layouts, cut, places["tensor"])
    forward, backward = price.layer(layer, places["context"], layouts.recompute)
    plain = backward
    if some_recomputed:  # else no layer is left out
        plain = price.layer(layer, places["context"], np.full_like(layouts.recompute, memory.NONE))[1]
    embedding = operations.embedding(model, cut, engine.kernels)
    head = operations.head(model, cut, engine.kernels)
    rows = np.minimum(cut.tokens, engine.kernels.head_rows) if engine.kernels.head_rows else cut.tokens
    kept, working = memory.kept_bytes(layer, cut, layouts.recompute)
    return Costs(
        layer_forward=forward,
        layer_backward=backward,
        layer_backward_plain=plain,
        layer_weight_s=price.seconds(layer.weight_gradient),
        embedding_forward=price.plain(embedding.forward, price.messages(1, 0)),
        embedding_backward=price.plain(embedding.input_gradient, price.messages(0, 1)),
        head_forward=price.plain(head.forward, price.messages(0, 1) + price.loss()),
        head_backward=price.plain(head.input_gradient + head.weight_gradient, price.messages(1, 0)),
        kept_bytes=kept,
        kept_bytes_plain=layer.kept_bytes,
        working_bytes=working,
        boundary_bytes=cut.rows * cut.hidden * cut.element,
        logits=rows * cut.vocab,
        which=which,
    )


class _Pricer:
    """What all blocks of one call share."""

    def __init__(
        self,
        cluster: ClusterSpec,
        precision: str,
        engine: Engine,
        layouts: Candidates,
        cut: Cut,
        tensor: network.Placement,
    ) -> None:
        self.cluster, self.device, self.precision, self.engine = cluster, cluster.device, precision, engine
        self.layouts, self.cut, self.tensor, self.tax = layouts, cut, tensor, compute.overlap_tax(cluster.device)
        self.exposed = 1.0 - engine.tensor_overlap * layouts.overlap
        payload, self.chunks = cut.tokens * cut.hidden * cut.element, layouts.tensor_overlap_chunks
        self.all_reduce = network.collective_s(cluster, "all_reduce", payload, tensor)
        self.gather = network.collective_s(cluster, "all_gather", payload, tensor)
        pieces = payload / self.chunks
        self.all_reduces = self.chunks * network.collective_s(cluster, "all_reduce", pieces, tensor)
        self.gathers = self.chunks * network.collective_s(cluster, "all_gather", pieces, tensor)

    def _experts(self) -> Any:
        """Tokens to their experts and back, forward or backward: two all-to-alls over the ranks that share experts."""
        size = self.layouts.data // np.maximum(1, self.cut.expert_groups)
        place = network.placement(self.cluster, size, self.layouts.stride("data"))
        routed = self.cut.routed_tokens * self.cut.hidden * self.cut.element
        routed = routed / np.where(self.layouts.sequence_parallel, self.layouts.tensor, 1)
        return np.where(routed > 0, 2 * network.all_to_all_s(self.cluster, routed, place), 0.0)

    def messages(self, sums: int, gathers: int) -> Any:
        """Seconds of the tensor axis: `sums` all-reduces, or as many scatters and `gathers` gathers when the sequence
        is cut; gathers fall away when it is not."""
        return np.where(self.layouts.sequence_parallel, (sums + gathers) * self.gather, sums * self.all_reduce)

    def loss(self) -> Any:
        """Maximum, sum and target logit of each token: three values per token, summed over the tensor axis."""
        size = self.cut.tokens * self.cut.statistic
        return 3 * network.collective_s(self.cluster, "all_reduce", size, self.tensor)

    def seconds(self, work: tuple[operations.Operation, ...], *, backward: bool = False) -> Any:
        return compute.total_s(work, self.device, self.precision, self.engine, backward=backward)

    def plain(self, work: tuple[operations.Operation, ...], tensor_s: Any) -> Pass:
        """Embedding and head, which stay in 16 bits where layers multiply in 8."""
        precision = "bf16" if self.precision == "fp8" else self.precision
        compute_s = compute.total_s(work, self.device, precision, self.engine)
        total_s = compute_s + tensor_s
        return Pass(compute_s=compute_s, tensor_s=tensor_s, recompute_s=0.0 * total_s, total_s=total_s)

    def layer(self, block: Block, context: network.Placement, recompute: Array) -> tuple[Pass, Pass]:
        """Forward and backward of one layer; recompute belongs to backward."""
        host = self.engine.host_layer_s
        forward_s = self.seconds(block.forward)
        core_s = self.seconds(tuple(op for op in block.forward if op.again))
        backward_s = self.seconds(block.input_gradient, backward=True) + self.seconds(block.weight_gradient)
        ring_f, ring_b = (seconds + self._experts() for seconds in self._ring(block, context))
        forward_tensor = self._forward_tensor(block) + ring_f
        backward_tensor = self._backward_tensor(block, recompute) + ring_b
        full, selective = recompute == memory.FULL, recompute == memory.SELECTIVE
        repeated = np.where(full, forward_s, np.where(selective, core_s, 0.0))
        repeated_tensor = np.where(full, forward_tensor, 0.0)
        forward = Pass(
            compute_s=forward_s,
            tensor_s=forward_tensor,
            recompute_s=0.0 * forward_s,
            total_s=self._issued(forward_s + forward_tensor, host),
        )
        backward_total = self._issued(backward_s + backward_tensor, host * self.engine.host_backward)
        repeated_total = np.where(full, self._issued(repeated + repeated_tensor, host), repeated)
        backward = Pass(
            compute_s=backward_s,
            tensor_s=backward_tensor,
            recompute_s=repeated_total,
            total_s=backward_total + repeated_total,
        )
        return forward, backward

    def _issued(self, device_s: Any, host_s: float) -> Any:
        """Seconds of work that a host issues: the longer of both for a rank alone. Ranks of a tensor group wait for
        each other's hosts and devices at every message, so that both count: the root of their squares, which is what
        vTrain's runs and the Ultra-Scale Playbook's show (docs/log/2026-11-29-planner-accuracy.md)."""
        return np.where(self.tensor.size > 1, np.hypot(device_s, host_s), np.maximum(device_s, host_s))

    def _forward_tensor(self, block: Block) -> Any:
        """Waiting for the tensor axis in a layer's forward: half-blocks are opened by gathers and closed by scatters
        where the sequence is cut, by sums where it is not."""
        waiting: Any = 0.0
        for first, last in HALF_BLOCKS:
            before, behind = (self._named(block.forward, name) for name in (first, last))
            cut = self._alternating(self.gathers, before) + self._alternating(self.gathers, behind)
            whole = self._alternating(self.all_reduces, behind)
            waiting = waiting + np.where(self.layouts.sequence_parallel, cut, whole)
        return waiting * self.exposed

    def _named(self, work: tuple[operations.Operation, ...], name: str) -> Any:
        return self.seconds(tuple(op for op in work if op.name == name))

    def _alternating(self, message_s: Any, product_s: Any) -> Any:
        """What is waited for of messages that alternate with a product, chunk by chunk: one chunk's message or product
        is alone, and what outlasts the other. Without chunks all of it."""
        if not self.layouts.overlap or np.all(self.chunks == 1):
            return message_s
        both = np.maximum(message_s, product_s) + np.minimum(message_s, product_s) / self.chunks
        return np.where(self.chunks == 1, message_s, np.maximum(self.tax * message_s, both - product_s))

    def _backward_tensor(self, block: Block, recompute: Array) -> Any:
        """Waiting for the tensor axis in a layer's backward.

        The gradient of the input of qkv and of up is summed beside their own weight gradient, if the engine does that;
        with the sequence cut, gradients into out and down are gathered in the open, and inputs gathered again beside
        the input gradients. Chunks of the sums, and of those gathers, alternate with the products.
        """
        sums: Any = np.where(self.layouts.sequence_parallel, self.gathers, self.all_reduces)
        kernels = self.engine.kernels
        dropped = (recompute == memory.SELECTIVE) & (kernels.selective == "cheap")
        again = np.where(dropped, 1.0, 1.0 - kernels.keep_gathered)
        waiting: Any = 0.0
        for first, last in HALF_BLOCKS:
            weight = self._named(block.weight_gradient, f"{first} weight gradient")
            inputs, before = (self._named(block.input_gradient, f"{name} input gradient") for name in (first, last))
            left = self._alternating(sums, inputs)
            alone, beside = left * self.exposed, np.maximum(self.tax * sums, left - weight)
            waiting = waiting + (beside if self.engine.async_gradients and self.layouts.overlap else alone)
            opened = self._alternating(self.gathers, before) * self.exposed
            gathered = opened + again * self._behind(self.gather, inputs)
            waiting = waiting + np.where(self.layouts.sequence_parallel, gathered, 0.0)
        return waiting

    def _behind(self, message_s: Any, beside_s: Any) -> Any:
        """What a message costs that runs beside compute: what it takes longer, and at least its tax on that compute."""
        if not self.layouts.overlap:
            return message_s
        return np.maximum(self.tax * message_s, message_s - beside_s)

    def _ring(self, block: Block, context: network.Placement) -> tuple[Any, Any]:
        """Ring attention: keys and values go round while the core works; what the core does not hide is exposed."""
        size = np.maximum(1, context.size)
        payload = 2 * self.cut.tokens * self.cut.kv * self.cut.element
        round_s = (size - 1) * network.point_to_point_s(self.cluster, payload, context)
        forward = self.seconds(tuple(op for op in block.forward if op.kind == "attention"))
        backward = self.seconds(tuple(op for op in block.input_gradient if op.kind == "attention"), backward=True)
        return np.maximum(0.0, round_s - forward), np.maximum(0.0, 2 * round_s - backward)
