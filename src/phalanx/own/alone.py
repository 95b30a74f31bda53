"""A module's first step over several processes, held against the same step by the module alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from phalanx.own.nest import Nest, samples, tensors
from phalanx.own.prepare import prepare
from phalanx.own.stage import Forward, Loss, ModuleBatch, Tally, call
from phalanx.own.step import Step
from phalanx.own.whole import whole_gradients
from phalanx.plan.module import ModulePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Losses and gradient norms, (over the processes, alone); of each trained parameter the norm of the difference of
    its gradients and that of its gradient alone."""

    loss: tuple[float, float]
    norm: tuple[float, float]
    gradients: Mapping[str, tuple[float, float]]


def compare_alone(
    make: Callable[[], nn.Module], loss: Loss, batch: Nest, plan: ModulePlan, *, forward: Forward = call, **options: Any
) -> Compared:
    """Run one step on `batch`, a global batch that all ranks hold, with layers of dropout switched off; on rank 0 run
    it alone as well: the whole batch at once or, where there are batch norms, in the layout's micro-batches. All ranks
    call this, and get the same answer. `options` are those of `prepare`."""
    module = make()
    without_dropout(module)
    with prepare(module, plan, forward=forward, **options) as step:
        return compare_step(step, make, loss, batch, forward)


def compare_step(step: Step, make: Callable[[], nn.Module], loss: Loss, batch: Nest, forward: Forward) -> Compared:
    """The same, of a step that is prepared."""
    trained = [tensor.name for tensor in step.plan.tensors if tensor.role == "trained"]
    step.forward_backward(step.share(batch), loss)
    gradients, weights = whole_gradients(step.engine), step.state_dict()
    numbers = torch.zeros(4 + 2 * len(trained), dtype=torch.float64)
    if step.world.rank == 0:
        module = make()
        without_dropout(module)
        module.load_state_dict(weights, strict=False)
        expected = _alone(module, loss, batch, step.plan.layout.micro_batch, forward)
        alone = {name: _gradient(module.get_parameter(name)) for name in trained}
        numbers[:4] = torch.tensor([step.loss, expected, step.gradient_norm, _norm(list(alone.values()))])
        distances = [[(gradients[name] - own).norm(), own.norm()] for name, own in alone.items()]
        numbers[4:] = torch.tensor(distances).flatten()
    numbers = numbers.to(step.world.device)
    step.world.comm("world").broadcast(numbers, root=0, purpose="verification")
    ours, theirs, norm, norm_alone, *rest = numbers.tolist()
    return Compared(
        loss=(ours, theirs),
        norm=(norm, norm_alone),
        gradients={name: (rest[2 * number], rest[2 * number + 1]) for number, name in enumerate(trained)},
    )


def _alone(module: nn.Module, loss: Loss, batch: Nest, micro_batch: int, forward: Forward) -> float:
    """Forward and backward with torch alone; the mean loss."""
    size = next(len(tensor) for tensor in tensors(batch) if tensor.dim())
    piece = micro_batch if any(isinstance(part, _BatchNorm) for part in module.modules()) else size
    tally, total = Tally(torch.device("cpu")), torch.zeros(())
    for start in range(0, size, piece):
        values = samples(batch, start, start + piece)
        total = total + tally.take(forward(module, values), ModuleBatch(values=values, loss=loss))
    mean = total / tally.count
    mean.backward()
    return mean.item()


def without_dropout(module: nn.Module) -> None:
    """Set to zero the probability of layers of dropout, and of modules that keep one as a number of their own:
    `nn.MultiheadAttention.dropout`, `attention_dropout` of Llama's attention in `transformers`."""
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _norm(found: list[Tensor]) -> float:
    return float(torch.stack([gradient.double().norm() for gradient in found]).norm())
