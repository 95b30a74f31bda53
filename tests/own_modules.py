"""Modules of a user's own, and one process that trains them with torch alone, to hold the ranks against."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers import run_worlds
from tiny import tiny_model
from torch import Tensor, nn

from phalanx.own.prepare import prepared
from phalanx.own.step import Step
from phalanx.own.units import named_tensors
from phalanx.own.whole import whole_gradients
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.spec.job import JobSpec, OptimizerSpec
from phalanx.trainer.world import World

BATCH = 8


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(F.gelu(self.up(self.norm(inputs))))


class Small(nn.Module):
    """A convolution, two blocks in a list, a parameter of its own, and a head."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) * self.scale
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(1))


def small() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def images(step: int = 0, size: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 1, 4, 4, generator=generator), torch.randint(5, (size,), generator=generator)


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def module_plan(layout: Layout, *, precision: str = "fp32", num_steps: int = 3, **job: Any) -> ModulePlan:
    optimizer = OptimizerSpec(lr=1e-2, schedule="constant", clip_norm=job.pop("clip_norm", 0.0))
    return ModulePlan(
        job=JobSpec(
            global_batch=BATCH, seq_len=1, num_steps=num_steps, precision=precision, optimizer=optimizer, **job
        ),
        layout=layout,
    )


def step_in(world: World, module: nn.Module, plan: ModulePlan, **options: Any) -> Step:
    """`phalanx.prepare` among ranks that have met."""
    kept = {name: options.pop(name) for name in ("unused", "run_dir") if name in options}
    plan = plan.of(named_tensors(module))
    return Step(world, plan, prepared(world, module, plan, **options), **{"run_dir": None, **kept})


def on_ranks(layout: Layout, function: Any, *args: Any, **options: Any) -> list[Any]:
    """`function(world, *args)` on each rank of `layout`."""
    return run_worlds(layout, function, *args, model=tiny_model(), **options)


def load_kernels_without_data() -> None:
    """Torch imports what runs on tensors without data at first use, for seconds: once, before ranks are forked."""
    F.layer_norm(F.linear(torch.empty(4, 8, device="meta"), torch.empty(8, 8, device="meta")), (8,))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def gradients_of(step: Step) -> dict[str, Tensor]:
    return whole_gradients(step.engine)
