"""Which boxes of a whole parameter one rank of a group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import InputError
from phalanx.plan.comm import Comm
from phalanx.plan.shards import Rectangle


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCut:
    """A parameter of `shape`, of which a rank holds `boxes`, one below the other along dim 0. `copied`: all ranks hold
    all of it."""

    shape: tuple[int, ...]
    boxes: tuple[Rectangle, ...]
    copied: bool = False

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter, a tensor of its own."""
        return torch.cat([whole[box.index] for box in self.boxes]).contiguous()


def copied(whole: Tensor) -> ParameterCut:
    """A parameter that is not cut."""
    shape = tuple(whole.shape)
    return ParameterCut(shape=shape, boxes=(Rectangle.of(shape),), copied=True)


def evenly(whole: Tensor, dim: int, parts: Sequence[int], comm: Comm, what: str) -> ParameterCut:
    """Cut along `dim`, which consists of parts of these sizes, each of them evenly. Raises InputError, naming `what`,
    where that is not possible."""
    if sum(parts) != whole.shape[dim]:
        raise InputError(f"parts {list(parts)} of {what} do not sum to {whole.shape[dim]}", instead="parts that do")
    boxes, first = [], 0
    for part in parts:
        if part % comm.size:
            raise InputError(f"{what} of {part} do not divide among {comm.size} ranks", instead="a group that divides")
        share = part // comm.size
        boxes.append(_box(whole, dim, first + comm.index * share, first + (comm.index + 1) * share))
        first += part
    return ParameterCut(shape=tuple(whole.shape), boxes=tuple(boxes))


def rows(whole: Tensor, comm: Comm) -> ParameterCut:
    """Cut along dim 0; where that is not even, the last ranks hold fewer rows. Raises InputError if one had none."""
    share = -(-whole.shape[0] // comm.size)
    if share * (comm.size - 1) >= whole.shape[0]:
        raise InputError(
            f"{whole.shape[0]} rows leave none for the last of {comm.size} ranks", instead="a smaller group"
        )
    first = comm.index * share
    return ParameterCut(shape=tuple(whole.shape), boxes=(_box(whole, 0, first, min(first + share, whole.shape[0])),))


def _box(whole: Tensor, dim: int, first: int, last: int) -> Rectangle:
    start, stop = [0] * whole.dim(), list(whole.shape)
    start[dim], stop[dim] = first, last
    return Rectangle(start=tuple(start), stop=tuple(stop))


@torch.no_grad()
def from_first(whole: Tensor, comm: Comm) -> Tensor:
    """What the first rank holds, on all ranks."""
    if comm.size == 1 or whole.is_meta:
        return whole
    values = whole.detach().contiguous()
    comm.broadcast(values, root=0, purpose="initial weights")
    return values
