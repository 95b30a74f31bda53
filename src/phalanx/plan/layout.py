"""Layout: how many ranks each axis has, and what follows: coordinates, groups, and why a layout is illegal.

An axis is an entry of AXES, slowest to fastest, so that neighbouring ranks share the tensor axis and thus a node:

    rank = ((pipeline × D + data) × C + context) × T + tensor

or, where data is the outermost axis, so that a whole pipeline may lie within a node:

    rank = ((data × P + pipeline) × C + context) × T + tensor
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

AXES = ("pipeline", "data", "context", "tensor")

Recompute = Literal["none", "selective", "full"]

Reduce = Literal["fp32", "bf16", "fp16", "powersgd", "top-k"]

Outermost = Literal["pipeline", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coord:
    """One rank's position on each axis."""

    pipeline: int = 0
    data: int = 0
    context: int = 0
    tensor: int = 0

    def __str__(self) -> str:
        return " ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if axis != "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything that was decided about how the work is cut. Sizes of axes, and:

    `micro_batch`: sequences per forward; `schedule`, `virtual_stages`: order of the pipeline; `stage_layers`: how many
    transformer layers each (virtual) stage holds, or None to balance by cost; `zero`: what is cut over the data axis
    (0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters); `zero_group`: over how many neighbours on it, with
    copies on the others (0: all of it); `expert_group`: over how many neighbours on it the experts of a mixture lie,
    likewise (0: as many as divide both); `sequence_parallel`: whether activations between half-blocks are cut along
    the sequence over the tensor axis; `recompute`, in layers whose number `recompute_every` divides, or in the first
    `recompute_layers` of each stage; `bucket_bytes`: gradients are reduced over the data axis in messages of about this
    size; `reduce`: as what they travel (see `plan.reduction`), with `reduce_rank` for PowerSGD and `reduce_fraction`
    for top-k; `overlap`: whether messages travel while blocks compute; `tensor_overlap_chunks`: how many chunks of
    tokens a matrix product and the collective of the tensor axis beside it are cut into, so that they alternate;
    `outermost`: the axis along which ranks are numbered slowest, whose neighbours thus lie furthest apart.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] | None = None
    zero: int = 0
    zero_group: int = 0
    expert_group: int = 0
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    recompute_every: int = 1
    recompute_layers: tuple[int, ...] | None = None
    bucket_bytes: int = 16 * 2**20
    reduce: Reduce = "fp32"
    reduce_rank: int = 4
    reduce_fraction: float = 0.01
    overlap: bool = True
    tensor_overlap_chunks: int = 1
    outermost: Outermost = "pipeline"

    @property
    def order(self) -> tuple[str, ...]:
        """AXES as ranks are numbered, slowest first."""
        return (self.outermost, *(axis for axis in AXES if axis != self.outermost))

    def stride(self, axis: str) -> int:
        """How far the ranks of neighbours on `axis` lie apart."""
        return math.prod(getattr(self, faster) for faster in self.order[self.order.index(axis) + 1 :])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_ranks(self) -> int:
        """Product of all axis sizes."""
        return math.prod(self.sizes)

    @property
    def num_stages(self) -> int:
        """Stages that a micro-batch passes through: pipeline × virtual stages."""
        return self.pipeline * self.virtual_stages

    @property
    def num_shards(self) -> int:
        """Neighbouring data ranks that each own a part of what ZeRO cuts; 1 without ZeRO."""
        return (self.zero_group or self.data) if self.zero else 1

    def num_micro_batches(self, global_batch: int) -> int:
        """Micro-batches that each data coordinate runs per optimizer step."""
        return global_batch // (self.micro_batch * self.data)

    def coord(self, rank: int) -> Coord:
        """The position of global rank `rank`."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        position = {}
        for axis in reversed(self.order):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return Coord(**position)

    def rank(self, coord: Coord) -> int:
        """The global rank at `coord`; inverse of `coord()`."""
        rank = 0
        for axis in self.order:
            rank = rank * getattr(self, axis) + getattr(coord, axis)
        return rank

    def coords(self) -> Iterator[Coord]:
        """All positions in rank order."""
        for position in itertools.product(*(range(getattr(self, axis)) for axis in self.order)):
            yield Coord(**dict(zip(self.order, position, strict=True)))

    def __str__(self) -> str:
        """As `tensor 2 × pipeline 2 × data 2, micro-batch 1, 1f1b, ZeRO 1, sequence parallel`."""
        axes = " × ".join(f"{axis} {getattr(self, axis)}" for axis in ("tensor", "context", "pipeline", "data"))
        words = [axes.replace("context 1 × ", ""), f"micro-batch {self.micro_batch}"]
        words += [self.schedule] if self.pipeline > 1 else []
        words += [f"{self.virtual_stages} virtual stages"] if self.virtual_stages > 1 else []
        words += [f"{self.outermost} outermost"] if self.outermost != "pipeline" else []
        within = f" within {self.zero_group}" if self.zero_group else ""
        words += [f"ZeRO {self.zero}{within}"] if self.zero else []
        words += [f"experts over {self.expert_group}"] if self.expert_group else []
        words += [f"{self.reduce} reduction"] if self.reduce != "fp32" else []
        words += ["sequence parallel"] if self.sequence_parallel and self.tensor > 1 else []
        words += [f"{self.tensor_overlap_chunks} chunks"] if self.tensor_overlap_chunks > 1 else []
        some = f" of every {self.recompute_every} layers" if self.recompute_every > 1 else ""
        some = f" of {self.recompute_layers} layers" if self.recompute_layers is not None else some
        words += [f"{self.recompute} recompute{some}"] if self.recompute != "none" else []
        return ", ".join(words)


def lines(layout: Layout, *axes: str) -> list[tuple[int, ...]]:
    """Ranks that differ only on `axes`: one tuple per combination of the other axes, in rank order."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, coord in enumerate(layout.coords()):
        key = tuple(getattr(coord, axis) for axis in AXES if axis not in axes)
        members.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in members.values()]
