"""Modules of a user's own, and one process that trains them with torch alone, to hold the ranks against."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers import run_worlds
from tiny import tiny_model
from torch import Tensor, nn

from phalanx.own.blocks import Blocks
from phalanx.own.prepare import prepared
from phalanx.own.step import Step
from phalanx.own.units import named_tensors
from phalanx.own.whole import whole_gradients
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.spec.job import JobSpec, OptimizerSpec
from phalanx.trainer.world import World

BATCH, WIDTH = 8, 12


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


class Block(nn.Module):
    """A block that takes and returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor, table: Tensor, places: Tensor) -> Tensor:
        moved = (hidden + table[places]) * self.gain
        return hidden + self.down(F.gelu(self.up(self.norm(moved))))


class Decoder(nn.Module):
    """Six blocks inside another module, a table without gradients, whole numbers, and a parameter before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.model = nn.Module()
        self.model.enter = nn.Linear(4, WIDTH)
        self.model.layers = nn.ModuleList(Block() for _ in range(6))
        self.model.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.randn(5, WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        state = before(self, (images,))
        for layer in self.model.layers:
            state = block(layer, state)
        return after(self, state, (images,))


def before(module: nn.Module, batch: Any) -> dict[str, Any]:
    hidden = module.model.enter(batch[0].flatten(1).unflatten(1, (4, 4)))
    hidden = torch.cat([module.token.expand(len(hidden), 1, WIDTH), hidden], 1)
    return {"hidden": hidden, "table": module.table * 1.0, "more": [torch.arange(5), None, "text"]}


def block(layer: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "hidden": layer(state["hidden"], state["table"], state["more"][0])}


def after(module: nn.Module, state: dict[str, Any], batch: Any) -> Tensor:
    return module.head(module.model.norm(state["hidden"]).mean(1))


BLOCKS = Blocks(path="model.layers", before=before, block=block, after=after)


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder()


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


def first_step(
    world: World, plan: ModulePlan, make: Any, batch: Any, loss: Any, options: Any
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a global batch."""
    step = step_in(world, make(), plan, **options)
    return step.forward_backward(step.share(batch), loss), gradients_of(step)


def trained_alone(
    make: Any, num_steps: int, dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """With torch alone, each batch in one forward: losses, the gradients of the first step, and the module."""
    module = make().to(dtype)
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    losses, gradients = [], {}
    for number in range(num_steps):
        optimizer.zero_grad()
        inputs, labels = images(number)
        loss = cross_entropy(module(inputs.to(dtype)), (inputs, labels))
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        optimizer.step()
    return losses, gradients, module


def on_ranks(layout: Layout, function: Any, *args: Any, **options: Any) -> list[Any]:
    """`function(world, *args)` on each rank of `layout`."""
    return run_worlds(layout, function, *args, **{"model": tiny_model(), **options})


def load_kernels_without_data() -> None:
    """Torch imports what runs on tensors without data at first use, for seconds: once, before ranks are forked."""
    F.layer_norm(F.linear(torch.empty(4, 8, device="meta"), torch.empty(8, 8, device="meta")), (8,))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def gradients_of(step: Step) -> dict[str, Tensor]:
    return whole_gradients(step.engine)
