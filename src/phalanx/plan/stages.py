"""Stages: which layers each pipeline stage holds, so that the slowest stage is as fast as it can be.

A pipeline of m micro-batches runs for (sum of all stages) + (m - 1) × (slowest stage): the sum is fixed, the slowest
stage is what a split can improve. The output head of a large vocabulary costs as much as several layers, so equal
counts are not equal costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.groups import kv_copies
from phalanx.plan.layout import Layout
from phalanx.spec.model import ModelSpec

# Elementwise work on each logit for the loss: maximum, subtraction, exponential, sum, and the gradient's scale.
LOSS_FLOPS_PER_LOGIT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: global layer numbers `layers` (possibly none), and whether the embedding stands before them and the
    final norm, output head and loss behind them."""

    index: int
    embedding: bool
    layers: range
    head: bool

    def __str__(self) -> str:
        parts = ["embedding"] if self.embedding else []
        if self.layers:
            parts.append(f"layers {self.layers.start}-{self.layers.stop - 1}")
        parts += ["head"] if self.head else []
        return f"stage {self.index}: {', '.join(parts) or 'nothing'}"


def recomputed_layers(layout: Layout, stage: Stage) -> range:
    """Numbers of the layers of `stage` that backward computes again, all or in part, as `layout.recompute` says."""
    if layout.recompute == "none":
        return range(0)
    if layout.recompute_layers is not None:
        return stage.layers[: layout.recompute_layers[stage.index]]
    every = layout.recompute_every
    return range(-(-stage.layers.start // every) * every, stage.layers.stop, every)


def layer_cost(model: ModelSpec, seq_len: int, tensor: int = 1) -> int:
    """Forward FLOPs per token of one layer: matrix products and the causal attention core (docs/equations.md, 10).

    Summed over the ranks of a tensor axis of size `tensor`, where kv heads may be computed in copies.
    """
    matrices = 2 * model.hidden * (model.q_rows + model.kv_rows * kv_copies(model, tensor))
    matrices += (3 if model.gated else 2) * model.hidden * model.ffn
    return 2 * matrices + 2 * (seq_len + 1) * model.q_rows


def embedding_cost(model: ModelSpec) -> int:
    """Forward operations per token of the embedding: a row is copied, and a position added where it is learned."""
    return model.hidden * (2 if model.positions == "learned" else 1)


def head_cost(model: ModelSpec) -> int:
    """Forward FLOPs per token of the output head and the loss."""
    return (2 * model.hidden + LOSS_FLOPS_PER_LOGIT) * model.vocab


def stage_costs(model: ModelSpec, seq_len: int, stages: Sequence[Stage], tensor: int = 1) -> tuple[int, ...]:
    """Forward FLOPs per token of each stage; backward costs twice that everywhere, so ratios hold for both."""
    layer = layer_cost(model, seq_len, tensor)
    return tuple(
        len(stage.layers) * layer + stage.embedding * embedding_cost(model) + stage.head * head_cost(model)
        for stage in stages
    )


def split(
    model: ModelSpec, seq_len: int, num_stages: int, stage_layers: Sequence[int] | None = None, tensor: int = 1
) -> tuple[Stage, ...]:
    """Cut the model into `num_stages` stages: every layer exactly once, in order, embedding first, head last.

    `stage_layers` gives the number of layers per stage (0 allowed); without it the slowest stage is made as fast as
    possible. Sizes must be legal: `legality.problems` is where users hear about it.
    """
    counts = balance(model, seq_len, num_stages, tensor) if stage_layers is None else tuple(stage_layers)
    assert (len(counts), sum(counts)) == (num_stages, model.num_layers), counts
    stages, start = [], 0
    for index, count in enumerate(counts):
        layers = range(start, start + count)
        stages.append(Stage(index=index, embedding=index == 0, layers=layers, head=index == num_stages - 1))
        start += count
    return tuple(stages)


def balance(model: ModelSpec, seq_len: int, num_stages: int, tensor: int = 1) -> tuple[int, ...]:
    """Layers per stage with the fastest slowest stage.

    Layers cost the same, so handing each to the stage that is cheapest after receiving it is exact. Among equals, a
    stage without layers goes first, then inner stages (the ends hold the vocabulary's weights), then later ones (under
    1F1B they hold fewer micro-batches). The last stage stays empty only where the head alone outweighs a layer.
    """
    assert 1 <= num_stages <= model.num_layers, f"{num_stages} stages, {model.num_layers} layers"
    layer, counts, costs = layer_cost(model, seq_len, tensor), [0] * num_stages, [0] * num_stages
    costs[0] += embedding_cost(model)
    costs[-1] += head_cost(model)
    ends = (0, num_stages - 1)
    queue = [(cost, False, i in ends, -i) for i, cost in enumerate(costs)]
    heapq.heapify(queue)
    for _ in range(model.num_layers):
        cost, _, at_end, number = queue[0]
        counts[-number] += 1
        heapq.heapreplace(queue, (cost + layer, True, at_end, number))
    return tuple(counts)
