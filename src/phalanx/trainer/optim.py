"""AdamW on flat slices, clipping by one norm of the whole model, and the learning-rate curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw  # not the class: building one loads torch's compiler, a second on every rank

from phalanx.spec.job import OptimizerSpec
from phalanx.trainer.data_parallel import Slice

ROW = 4096
"""Values whose squares are added up in their own precision."""


def learning_rate(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """The rate of step `step` (0 first): linear warm-up to `lr`, then the curve down to `min_lr` at the last step."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    done = (step - spec.warmup_steps) / max(1, num_steps - 1 - spec.warmup_steps)
    left = 0.5 * (1 + math.cos(math.pi * min(1.0, done))) if spec.schedule == "cosine" else 1 - min(1.0, done)
    return spec.min_lr + (spec.lr - spec.min_lr) * left


def clip_coefficient(norm: float, clip_norm: float) -> float:
    """What gradients are multiplied by so that their global norm is at most `clip_norm` (0: no limit)."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0


def squared_norm(slices: Sequence[Slice], first_replica: bool) -> Tensor:
    """This rank's share of the squared global gradient norm, float64: summed over all ranks, each value counts once.

    Copies count on one rank only: of the data ranks that hold the same gradients, on the first.
    """
    total = torch.zeros((), dtype=torch.float64, device=slices[0].gradients.device if slices else None)
    if first_replica:
        for part in slices:
            if part.part.counted:
                total += squared(part.gradients)
    return total


def squared(values: Tensor) -> Tensor:
    """Squared norm of a flat tensor, float64. Row by row, since one long float32 sum loses the small addends: the norm
    of 7 million values would be wrong by 2e-4, of 50 million by 4e-3, and clipping would depend on the layout."""
    whole = values.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1)
    return rows.double().square().sum() + torch.linalg.vector_norm(values[whole:]).double().square()


class AdamW:
    """Decoupled weight decay on matrices only (Loshchilov and Hutter 2019); one fused update for all slices.

    Master weights and moments have the accumulation dtype. Where parameters have it too, they are their own masters.
    `num_steps` counts the updates made so far, by which AdamW corrects its moments' bias.
    """

    def __init__(self, slices: Sequence[Slice], spec: OptimizerSpec) -> None:
        self.slices, self.spec, self.num_steps = tuple(slices), spec, 0
        self.masters = tuple(part.parameters.to(part.gradients.dtype) for part in slices)
        self.moments = tuple((torch.zeros_like(master), torch.zeros_like(master)) for master in self.masters)

    @torch.no_grad()
    def step(self, rate: float, coefficient: float) -> None:
        """Update with learning rate `rate`; gradients are multiplied by `coefficient` (clipping) on the way."""
        for decayed in (True, False):
            self._update(self._members(decayed=decayed), rate, self.spec.weight_decay if decayed else 0.0, coefficient)
        self.num_steps += 1
        self.publish()

    def _members(self, *, decayed: bool) -> list[int]:
        """Which slices are decayed, or are not; without empty ones."""
        return [i for i, part in enumerate(self.slices) if part.part.decayed == decayed and self.masters[i].numel()]

    def _update(self, members: Sequence[int], rate: float, weight_decay: float, coefficient: float) -> None:
        if not members:
            return
        masters = [self.masters[i] for i in members]
        # The fused kernel divides by grad_scale as it reads, which saves a pass over all gradients.
        scale = masters[0].new_full((), 1.0 / coefficient, dtype=torch.float32) if coefficient != 1.0 else None
        adamw(
            masters,
            [self.slices[i].gradients for i in members],
            [self.moments[i][0] for i in members],
            [self.moments[i][1] for i in members],
            [],
            [master.new_full((), self.num_steps, dtype=torch.float32) for master in masters],
            fused=True,
            grad_scale=scale,
            amsgrad=False,
            beta1=self.spec.betas[0],
            beta2=self.spec.betas[1],
            lr=rate,
            weight_decay=weight_decay,
            eps=self.spec.eps,
            maximize=False,
        )

    def publish(self) -> None:
        """Carry master weights to the parameters that forward reads."""
        for part, master in zip(self.slices, self.masters, strict=True):
            if master.dtype != part.parameters.dtype:
                part.parameters.copy_(master)

    def state(self) -> Iterator[dict[str, Tensor]]:
        """Per slice, live views of its master weights and moments, flat."""
        for master, (first, second) in zip(self.masters, self.moments, strict=True):
            yield {"weight": master, "exp_avg": first, "exp_avg_sq": second}
