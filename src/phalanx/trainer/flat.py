"""Flat buffers: all parameters of a block in one tensor, all its gradients in another, and views of both by leaf."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.plan.shards import Buffer

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def accumulation_dtype(compute: torch.dtype) -> torch.dtype:
    """Gradients, master weights and moments are never narrower than fp32."""
    return torch.promote_types(compute, torch.float32)


@dataclass(frozen=True, slots=True)
class Weight:
    """Views of one leaf: its value, and where its gradient is accumulated."""

    value: Tensor
    grad: Tensor


class FlatBuffer:
    """One block's parameters and gradients on this rank, laid out as `layout` (a plan.shards.Buffer) says.

    `parameters` has the compute dtype, `gradients` the accumulation dtype; `weights[name]` are views by leaf. Padding
    starts as zero and nothing ever writes to it.
    """

    def __init__(self, layout: Buffer, compute: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.parameters = torch.zeros(layout.num_elements, dtype=compute, device=device)
        self.gradients = torch.zeros(layout.num_elements, dtype=accumulation_dtype(compute), device=device)
        self.weights = {
            leaf.name: Weight(
                _view(self.parameters, leaf.offset, leaf.shape), _view(self.gradients, leaf.offset, leaf.shape)
            )
            for leaf in layout.leaves
        }


def _view(flat: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    return flat[offset : offset + torch.Size(shape).numel()].view(shape)


def add_product(weight: Weight, output_grad: Tensor, inputs: Tensor) -> None:
    """Add a linear layer's weight gradient, `output_gradᵀ inputs`, straight into the flat buffer.

    `output_grad` [tokens, rows], `inputs` [tokens, columns]. In bf16 one micro-batch's product is rounded once, the sum
    over micro-batches is kept in fp32.
    """
    if weight.grad.dtype == inputs.dtype:
        weight.grad.addmm_(output_grad.t(), inputs)
    else:
        weight.grad.add_(output_grad.t() @ inputs)
