"""Flat buffers: all parameters of a block in one tensor, all its gradients in another, and views of both by leaf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from phalanx.plan.shards import Buffer, Leaf, Piece
from phalanx.trainer.process import own_mapping

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def accumulation_dtype(compute: torch.dtype) -> torch.dtype:
    """Gradients, master weights and moments are never narrower than fp32."""
    return torch.promote_types(compute, torch.float32)


Products: TypeAlias = "list[tuple[Weight, Tensor, Tensor]]"


@dataclass(slots=True)
class Postponed:
    """Weight gradients of a buffer that are to be computed later. While `products` is a list, products go there as
    (weight, output gradient, inputs) instead of being computed; None computes them at once."""

    products: Products | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """Views of one leaf: its value, and where its gradient is accumulated; `postponed` is its buffer's."""

    value: Tensor
    grad: Tensor
    postponed: Postponed = field(default_factory=Postponed)


@contextmanager
def postponing(buffers: Sequence[FlatBuffer]) -> Iterator[Products]:
    """In here weight gradients are not computed: what they need is kept, in the order of backward, in the list."""
    products: Products = []
    for buffer in buffers:
        buffer.postponed.products = products
    try:
        yield products
    finally:  # no error leaves buffers behind whose gradients are never computed
        for buffer in buffers:
            buffer.postponed.products = None


class FlatBuffer:
    """One block's parameters and gradients on this rank, laid out as `layout` (a plan.shards.Buffer) says.

    `parameters` has the compute dtype, `gradients` the accumulation dtype; `weights[name]` are views by leaf. Both
    begin without memory; `allocate_…` gives it, zeroed, and `free_…` takes it back, the views staying what they are.
    Padding starts as zero and nothing ever writes to it.
    """

    def __init__(self, layout: Buffer, compute: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.parameters = torch.empty(layout.num_elements, dtype=compute, device=device)
        self.gradients = torch.empty(layout.num_elements, dtype=accumulation_dtype(compute), device=device)
        self.postponed = Postponed()
        self.weights = {leaf.name: self._weight(leaf) for leaf in layout.leaves}
        self.free_parameters()
        self.free_gradients()

    def allocate_parameters(self, *, zeroed: bool = True) -> None:
        """Make the parameters usable; nothing happens if they are. Not `zeroed` is for who writes all of them."""
        _allocate(self.parameters, zeroed)

    def free_parameters(self) -> None:
        """Let the memory of the parameters go; a block that runs now is refused by `check_parameters`."""
        self.parameters.untyped_storage().resize_(0)

    def check_parameters(self) -> None:
        """Raise RuntimeError if the parameters are freed: reading them would end the process without a word."""
        if not self.parameters.untyped_storage().size() and self.layout.num_elements:
            what = f"{self.layout.name} runs while its parameters are freed"
            raise RuntimeError(f"{what}: under ZeRO 3 they exist between before_forward and after_forward only")

    def values(self, piece: Piece) -> Tensor:
        """The parameters of `piece`, without padding of the vocabulary."""
        end = piece.offset + piece.rectangle.num_elements
        return self.parameters[piece.offset : end].view(piece.rectangle.shape)

    def allocate_gradients(self) -> None:
        """Make the gradients usable, zeroed; nothing happens if they are."""
        _allocate(self.gradients, zeroed=True)

    def free_gradients(self) -> None:
        """Let the memory of the gradients go."""
        self.gradients.untyped_storage().resize_(0)

    def _weight(self, leaf: Leaf) -> Weight:
        value, grad = (_view(flat, leaf.offset, leaf.shape) for flat in (self.parameters, self.gradients))
        return Weight(value, grad, self.postponed)


def _allocate(flat: Tensor, zeroed: bool) -> None:
    storage = flat.untyped_storage()
    if storage.size() != flat.numel() * flat.element_size():
        with own_mapping():
            storage.resize_(flat.numel() * flat.element_size())
        if zeroed:
            flat.zero_()


def _view(flat: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    return flat[offset : offset + torch.Size(shape).numel()].view(shape)


def add_product(weight: Weight, output_grad: Tensor, inputs: Tensor) -> None:
    """Add a linear layer's weight gradient, `output_gradᵀ inputs`, straight into the flat buffer.

    `output_grad` [tokens, rows], `inputs` [tokens, columns]. In bf16 one micro-batch's product is rounded once, the sum
    over micro-batches is kept in fp32.
    """
    if weight.postponed.products is not None:
        weight.postponed.products.append((weight, output_grad, inputs))
        return
    if weight.grad.dtype == inputs.dtype:
        weight.grad.addmm_(output_grad.t(), inputs)
    else:
        weight.grad.add_(output_grad.t() @ inputs)
