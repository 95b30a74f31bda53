"""Output head and loss in one, cut by the vocabulary: gradients are computed in forward, chunk by chunk of tokens, so
that the logits of a whole micro-batch never exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.plan.comm import Comm
from phalanx.plan.traffic import HEAD_ROWS
from phalanx.trainer.flat import Weight, accumulation_dtype, add_product
from phalanx.trainer.segments import EAGER, Segments
from phalanx.trainer.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a supervised token adds to the loss. With z its logits, one for each of the `vocab` ids (padding is not
    among them), and Z the sum of exp z:

        log Z - (1 - label_smoothing) z[label] - label_smoothing × mean(z) + z_loss × (log Z)²

    That is cross-entropy, its target smoothed after Szegedy et al. 2016, and PaLM's z-loss (Chowdhery et al. 2022).
    """

    vocab: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def head_loss(
    inputs: Tensor,
    weight: Weight,
    labels: Tensor,
    vocabulary: range,
    num_supervised: int,
    objective: Objective,
    parallel: TensorParallel,
    segments: Segments = EAGER,
    loss_scale: float = 1.0,
) -> Tensor:
    """Sum over supervised tokens of `objective`, divided by `num_supervised`: a float64 scalar, equal on all ranks.

    `inputs` [tokens, hidden]; `labels` [all tokens], negative where not supervised. `vocabulary`: the real (not
    padding) ids that this rank holds. The gradients, of `loss_scale` times that, are computed here and
    now; `backward` only hands the input's on.
    """
    result: Tensor = _HeadLoss.apply(
        inputs, weight, labels, vocabulary, num_supervised, objective, parallel, segments, loss_scale
    )
    return result


def cross_entropy(
    inputs: Tensor, weight: Tensor, labels: Tensor, vocabulary: range, parallel: TensorParallel
) -> Tensor:
    """Sum over supervised tokens of log Z - z[label], as in `head_loss`, whatever was trained for: a float64 scalar,
    equal on all ranks. For validation, so without gradients."""
    inputs, real = parallel.gather(inputs, "head input"), weight[: len(vocabulary)]
    total = torch.zeros((), dtype=torch.float64, device=inputs.device)
    for start in range(0, inputs.shape[0], HEAD_ROWS):
        chunk = slice(start, start + HEAD_ROWS)
        total += _chunk_cross_entropy(inputs[chunk], real, labels[chunk], vocabulary.start, parallel.comm)
    return total


def _chunk_cross_entropy(inputs: Tensor, weight: Tensor, labels: Tensor, first_row: int, comm: Comm) -> Tensor:
    scores = (inputs @ weight.t()).to(accumulation_dtype(inputs.dtype))
    _, _, target = _targets(scores, labels, first_row)
    log_sum, target = _over_ranks(torch.logsumexp(scores, 1), target, comm)
    return torch.where(labels >= 0, log_sum - target, 0.0).sum(dtype=torch.float64)


def _targets(scores: Tensor, labels: Tensor, first_row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per token: the label's column among this rank's, whether it is one of them, and its logit, or 0."""
    local = labels - first_row
    here = (labels >= 0) & (local >= 0) & (local < scores.shape[1])
    local = local.clamp(0, scores.shape[1] - 1)
    return local, here, torch.where(here, scores.gather(1, local.unsqueeze(1)).squeeze(1), 0.0)


def _over_ranks(log_sum: Tensor, linear: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of all columns, and the sum of what is linear in the logits, from each rank's part [tokens]."""
    if comm.size == 1:
        return log_sum, linear
    every = log_sum.new_empty(comm.size, 2, log_sum.shape[0])
    comm.all_gather(torch.stack([log_sum, linear]).unsqueeze(0), out=every, purpose="loss")
    return torch.logsumexp(every[:, 0], 0), every[:, 1].sum(0)


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Weight,
        labels: Tensor,
        vocabulary: range,
        num_supervised: int,
        objective: Objective,
        parallel: TensorParallel,
        segments: Segments,
        loss_scale: float,
    ) -> Tensor:
        rows = len(vocabulary)
        real = Weight(weight.value[:rows], weight.grad[:rows])
        inputs = parallel.gather(inputs, "head input")
        input_grad = torch.empty_like(inputs)
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for start in range(0, inputs.shape[0], HEAD_ROWS):
            chunk = slice(start, start + HEAD_ROWS)
            loss, input_grad[chunk] = _chunk_loss(
                inputs[chunk],
                real,
                labels[chunk],
                vocabulary.start,
                num_supervised / loss_scale,
                objective,
                parallel.comm,
                segments,
            )
            total += loss
        ctx.input_grad = parallel.reduce(input_grad, "head input gradient")
        return total / num_supervised

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
        input_grad, ctx.input_grad = ctx.input_grad, None
        return input_grad * output_grad.to(input_grad.dtype), *[None] * 8


def _chunk_loss(
    inputs: Tensor,
    weight: Weight,
    labels: Tensor,
    first_row: int,
    divisor: float,
    objective: Objective,
    comm: Comm,
    segments: Segments,
) -> tuple[Tensor, Tensor]:
    """Summed loss of one chunk and the gradient of `inputs`; adds the weight's gradient. Both gradients are those of
    the loss over `divisor`.

    Each rank reduces its own columns; its log-sum-exp and its part of what is linear in the logits then meet those of
    the others in one small message. With s the label smoothing, c the z-loss and V the ids of all ranks,
    d loss / d z = (1 + 2 c log Z) exp(z) / Z - (1 - s) onehot(label) - s / V.
    """
    kept, shared = 1.0 - objective.label_smoothing, objective.label_smoothing / objective.vocab
    scores = (inputs @ weight.value.t()).to(weight.grad.dtype)
    supervised = labels >= 0
    local, here, target = _targets(scores, labels, first_row)
    linear = target.mul_(kept)
    if shared:
        linear.add_(scores.sum(1), alpha=shared)
    exponentials, log_sum, highest = segments.exponentials(scores)
    log_sum, linear = _over_ranks(log_sum, linear, comm)
    factor = (highest - log_sum).exp_()
    losses = log_sum - linear
    if objective.z_loss:
        factor.mul_(1.0 + 2.0 * objective.z_loss * log_sum)
        losses.add_(log_sum.square(), alpha=objective.z_loss)
    loss = torch.where(supervised, losses, 0.0).sum(dtype=torch.float64)
    scale = (supervised.to(inputs.dtype) / divisor).unsqueeze(1)
    scores_grad = segments.loss_gradient(exponentials, factor, local, here, kept, shared).to(inputs.dtype)
    add_product(weight, scores_grad, inputs * scale)
    return loss, (scores_grad @ weight.value).mul_(scale)
