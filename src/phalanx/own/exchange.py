"""Exchange: nests of tensors that travel between stages as one flat tensor, so that a transfer is one message.

Floating tensors that carry gradients are cast to the widest type among them and joined; all else travels as its bits,
and has no gradient. A single tensor is not even copied. Shapes are found once, by running the module on
tensors without data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from phalanx.errors import InputError
from phalanx.own.blocks import Blocks, Section
from phalanx.own.nest import Nest, mapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of a nest; `differentiable`: gradients flow back through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def num_elements(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def num_lanes(self, wide: torch.dtype) -> int:
        """Elements of type `wide` that it takes in a message."""
        return (
            self.num_elements if self.differentiable else -(-self.num_elements * self.dtype.itemsize // wide.itemsize)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What passes between two stages: `leaves` holds a Piece for each tensor, and all else as it is; `wide` is the type
    of the message and `num_lanes` its length, the same at all boundaries."""

    leaves: tuple[Any, ...]
    structure: Any
    wide: torch.dtype
    num_lanes: int

    @property
    def pieces(self) -> list[Piece]:
        """The tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Piece)]

    def pack(self, nest: Nest) -> Tensor:
        """One flat tensor of the nest."""
        found = [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]
        self._check(found)
        lanes = [self._lanes(tensor, piece) for tensor, piece in zip(found, self.pieces, strict=True)]
        used = sum(lane.numel() for lane in lanes)
        if used < self.num_lanes:
            lanes.append(lanes[0].new_zeros(self.num_lanes - used, dtype=self.wide))
        return lanes[0] if len(lanes) == 1 else torch.cat(lanes)

    def _check(self, found: Sequence[Tensor]) -> None:
        shapes = [tuple(tensor.shape) for tensor in found]
        if shapes != [piece.shape for piece in self.pieces]:
            what = f"a stage hands on tensors of shapes {shapes}; without data it was {[p.shape for p in self.pieces]}"
            instead = "shapes between stages must not depend on values: pipeline = 1, or pad to one shape"
            raise InputError(what, where="blocks", instead=instead)

    def _lanes(self, tensor: Tensor, piece: Piece) -> Tensor:
        if piece.differentiable:
            return tensor.to(self.wide).reshape(-1)
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        missing = piece.num_lanes(self.wide) * self.wide.itemsize - bits.numel()
        return torch.cat([bits, bits.new_zeros(missing)]).view(self.wide)

    def unpack(self, message: Tensor) -> Nest:
        """The nest again; its tensors that carry gradients are parts of `message`."""
        start, leaves = 0, []
        for leaf in self.leaves:
            if not isinstance(leaf, Piece):
                leaves.append(leaf)
                continue
            part = message[start : start + leaf.num_lanes(self.wide)]
            start += len(part)
            if leaf.differentiable:
                leaves.append(part.view(leaf.shape).to(leaf.dtype))
            else:
                bits = part.detach().clone().view(torch.uint8)[: leaf.num_elements * leaf.dtype.itemsize]
                leaves.append(bits.view(leaf.dtype).view(leaf.shape))
        return pytree.tree_unflatten(leaves, self.structure)

    @property
    def differentiable(self) -> bool:
        """Whether any gradient flows back."""
        return any(piece.differentiable for piece in self.pieces)


class _Chain(nn.Module):
    """All of a module, as far as the last boundary: returns the nest at the end of each stage but the last."""

    def __init__(self, module: nn.Module, blocks: Blocks, sections: Sequence[Section]) -> None:
        super().__init__()
        self.module, self._blocks, self._sections = module, blocks, sections

    def forward(self, batch: Nest) -> list[Nest]:
        nest, ends = self._blocks.enter(self.module, batch), []
        listed = self._blocks.listed(self.module)
        for section in self._sections[:-1]:
            for layer in section.layers:
                nest = self._blocks.block(listed[layer], nest)
            ends.append(nest)
        return ends


def boundaries(
    module: nn.Module, blocks: Blocks, sections: Sequence[Section], batch: Nest, compute: torch.dtype
) -> list[Boundary]:
    """What passes between stages for a micro-batch of these shapes. Raises InputError if the module cannot be run on
    tensors without data."""
    if len(sections) == 1:
        return []
    chain = _Chain(module, blocks, sections)

    def hollow(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)

    named = [*chain.named_parameters(), *chain.named_buffers()]
    try:
        with torch.enable_grad():
            ends = functional_call(chain, {name: hollow(tensor) for name, tensor in named}, (mapped(hollow, batch),))
    except Exception as error:  # what a user's code raises when its tensors have no data may be anything
        what = f"the blocks cannot be run on tensors without data, by which shapes are found: {error}"
        instead = "let nothing between the stages depend on values (.item(), if tensor: …), or use pipeline = 1"
        raise InputError(what, where="blocks", instead=instead) from error
    flat = [pytree.tree_flatten(end) for end in ends]
    described = [[_piece(leaf) for leaf in leaves] for leaves, _ in flat]
    floats = [leaf.dtype for leaves in described for leaf in leaves if isinstance(leaf, Piece) and leaf.differentiable]
    wide = compute
    for dtype in floats:
        wide = torch.promote_types(wide, dtype)
    lengths = [sum(leaf.num_lanes(wide) for leaf in leaves if isinstance(leaf, Piece)) for leaves in described]
    return [
        Boundary(leaves=tuple(leaves), structure=structure, wide=wide, num_lanes=max(lengths))
        for leaves, (_, structure) in zip(described, flat, strict=True)
    ]


def _piece(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return Piece(shape=tuple(leaf.shape), dtype=leaf.dtype, differentiable=leaf.requires_grad)
