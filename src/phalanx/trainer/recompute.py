"""Activation checkpointing: keep a block's input instead of what its backward needs, and run it again then (Chen et al.
2016). Dropout masks are stateless, so the second forward draws the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Forward = Callable[[Tensor], Tensor]


def checkpointed(forward: Forward, inputs: Tensor) -> Tensor:
    """`forward(inputs)`, of which only `inputs` is kept; backward runs it a second time first."""
    result: Tensor = _Checkpointed.apply(inputs, forward)
    return result


class _Checkpointed(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward: Forward) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.run = forward
        return forward(inputs)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, None]:
        inputs = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(inputs)
        torch.autograd.backward(output, output_grad)
        return inputs.grad, None
