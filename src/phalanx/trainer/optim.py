"""AdamW on flat slices, clipping by one norm of the whole model, and the learning-rate curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.spec.job import OptimizerSpec
from phalanx.trainer.data_parallel import Slice


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


def squared_norm(slices: Sequence[Slice], sharded: bool, first_data_rank: bool) -> Tensor:
    """This rank's share of the squared global gradient norm, float64: summed over all ranks, each value counts once.

    Copies count on one rank only. Without sharding, data replicas hold the same gradients, and the first one counts.
    """
    total = torch.zeros((), dtype=torch.float64, device=slices[0].gradients.device if slices else None)
    if sharded or first_data_rank:
        for part in slices:
            if part.part.counted:
                total += torch.linalg.vector_norm(part.gradients).double().square()
    return total


class AdamW:
    """Decoupled weight decay on matrices only (Loshchilov and Hutter 2019); one fused update for all slices.

    Master weights and moments have the accumulation dtype. Where parameters have it too, they are their own masters.
    """

    def __init__(self, slices: Sequence[Slice], spec: OptimizerSpec) -> None:
        self.slices = tuple(slices)
        wide = [part.gradients.dtype for part in slices]
        self.masters = tuple(
            torch.nn.Parameter(part.parameters.to(dtype), requires_grad=False)
            for part, dtype in zip(slices, wide, strict=True)
        )
        groups = [
            {"params": self._masters(decayed=True), "weight_decay": spec.weight_decay},
            {"params": self._masters(decayed=False), "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
        for master in self.masters:
            # As AdamW itself would at the first step; made now, so that a checkpoint can be loaded into it.
            self.optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def _masters(self, *, decayed: bool) -> list[torch.nn.Parameter]:
        pairs = zip(self.slices, self.masters, strict=True)
        return [master for part, master in pairs if part.part.decayed == decayed and master.numel()]

    def step(self, rate: float, coefficient: float) -> None:
        """Update with learning rate `rate`; gradients are multiplied by `coefficient` (clipping) on the way."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for part, master in zip(self.slices, self.masters, strict=True):
            master.grad = part.gradients
        # The fused kernel divides by grad_scale as it reads, which saves a pass over all gradients.
        clips = coefficient != 1.0 and bool(self.masters)
        self.optimizer.grad_scale = (
            self.masters[0].new_tensor(1.0 / coefficient, dtype=torch.float32) if clips else None
        )
        self.optimizer.step()
        for master in self.masters:
            master.grad = None
        self.publish()

    def publish(self) -> None:
        """Carry master weights to the parameters that forward reads."""
        for part, master in zip(self.slices, self.masters, strict=True):
            if master.dtype != part.parameters.dtype:
                part.parameters.copy_(master)

    def state(self) -> Iterator[dict[str, Tensor]]:
        """Per slice, live views of its master weights and moments, flat."""
        for master in self.masters:
            moments = self.optimizer.state[master]
            yield {"weight": master.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}

    @property
    def num_steps(self) -> int:
        """Updates made so far (AdamW corrects its moments' bias by it)."""
        return int(self.optimizer.state[self.masters[0]]["step"]) if self.masters else 0

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        for moments in self.optimizer.state.values():
            moments["step"].fill_(float(steps))
