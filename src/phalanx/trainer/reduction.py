"""How gradients are summed over data ranks: exactly, rounded for the way, or in part with the rest kept for later.

Each sum is a generator of messages: it yields the Works after which it has something left to do and returns the last
one, so that whoever runs it can let a message travel under other work.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from phalanx.plan.comm import Comm, Work
from phalanx.plan.layout import Layout
from phalanx.plan.reduction import matrices, num_largest
from phalanx.trainer.comm import DONE
from phalanx.trainer.flat import FlatBuffer

PURPOSE = "gradients"

Messages: TypeAlias = Generator[Work, None, Work]


class Wire(Protocol):
    """Sums tensors over a group, in the dtype that it chooses for the way."""

    def all_reduce(self, comm: Comm, tensors: Sequence[Tensor]) -> Messages:
        """As `Comm.all_reduce`."""

    def reduce_scatter(self, comm: Comm, tensors: Sequence[Tensor], out: Sequence[Tensor]) -> Messages:
        """As `Comm.reduce_scatter`."""


class Exact:
    """Gradients travel as they were accumulated."""

    def all_reduce(self, comm: Comm, tensors: Sequence[Tensor]) -> Messages:
        """See `Wire.all_reduce`."""
        yield from ()
        return comm.all_reduce(tensors, purpose=PURPOSE, async_op=True)

    def reduce_scatter(self, comm: Comm, tensors: Sequence[Tensor], out: Sequence[Tensor]) -> Messages:
        """See `Wire.reduce_scatter`."""
        yield from ()
        return comm.reduce_scatter(tensors, out=out, purpose=PURPOSE, async_op=True)


class Rounded:
    """Gradients are rounded to a 16-bit `dtype`. float16 cannot hold what is small, or large: gradients are multiplied
    by a power of two, the largest under which the sum of all members cannot overflow; they agree on it first."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def all_reduce(self, comm: Comm, tensors: Sequence[Tensor]) -> Messages:
        """See `Wire.all_reduce`."""
        if comm.size == 1:
            return DONE
        scale = yield from self._scale(comm, tensors)
        rounded = [self._round(tensor, scale) for tensor in tensors]
        yield comm.all_reduce(rounded, purpose=PURPOSE, async_op=True)
        self._widen(rounded, tensors, scale)
        return DONE

    def reduce_scatter(self, comm: Comm, tensors: Sequence[Tensor], out: Sequence[Tensor]) -> Messages:
        """See `Wire.reduce_scatter`."""
        scale = yield from self._scale(comm, tensors)
        rounded = [self._round(tensor, scale) for tensor in tensors]
        mine = [tensor.view(comm.size, -1)[comm.index] for tensor in rounded]
        yield comm.reduce_scatter(rounded, out=mine, purpose=PURPOSE, async_op=True)
        self._widen(mine, out, scale)
        return DONE

    def _scale(self, comm: Comm, tensors: Sequence[Tensor]) -> Generator[Work, None, Tensor | None]:
        if self.dtype != torch.float16:
            return None
        peak = torch.stack([tensor.abs().amax() for tensor in tensors]).amax().view(1)
        yield comm.all_reduce(peak, purpose="gradient scale", op="max", async_op=True)
        # No gradient at all must not make the scale infinite.
        limit = torch.finfo(torch.float16).max / comm.size
        return torch.exp2(torch.floor(torch.log2(limit / peak.clamp(min=1e-30))))

    def _round(self, tensor: Tensor, scale: Tensor | None) -> Tensor:
        return (tensor if scale is None else tensor * scale).to(self.dtype)

    def _widen(self, rounded: Sequence[Tensor], tensors: Sequence[Tensor], scale: Tensor | None) -> None:
        for source, target in zip(rounded, tensors, strict=True):
            target.copy_(source)
            if scale is not None:
                target.div_(scale)


class Lossy(Protocol):
    """Sums the gradients of whole buffers over a group approximately, and remembers what it left out.

    `keeps_sent`: whether what the last reductions sent is kept as well, without which nothing is taken back.
    """

    keeps_sent: bool

    def all_reduce(self, buffers: Sequence[FlatBuffer]) -> Messages:
        """Add the last error to this rank's gradients, make them an approximation of the sum of all ranks' that is
        the same everywhere, and keep as error what of this rank's own the approximation lacks."""

    def take_back(self) -> None:
        """Keep what the last reductions sent as well, as after a step whose gradients nobody applies."""

    def forget(self) -> None:
        """Begin anew with what is kept, as after a step whose gradients were no finite numbers."""

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """What is kept from one reduction to the next, by name; writing into the tensors restores it."""


class PowerSGD:
    """Each matrix M [rows, columns] becomes P Qᵀ of rank `rank`: P spans the columns of (Σ M) Q_before, Q = Σ Mᵀ P.
    One step of power iteration per reduction, going on from the last Q (Vogels et al. 2019, algorithm 1).

    A rank's error is M - P (Mᵀ P)ᵀ, its own M without its part of what was sent.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], comm: Comm, rank: int, seed: int) -> None:
        """The first Q are drawn from `seed`, alike on all members."""
        self.comm, self._seed, self.keeps_sent = comm, seed, False
        self._leaves = {buffer: list(matrices(buffer.layout, rank)) for buffer in buffers}
        self._errors = {matrix: torch.zeros_like(matrix) for matrix in self._matrices(buffers)}
        self._right = {matrix: matrix.new_empty(matrix.shape[1], rank) for matrix in self._errors}
        self._sent: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}  # P, this rank's part of Q, and Q before
        self._names = [f"{buffer.layout.name}.{leaf.name}" for buffer in buffers for leaf in self._leaves[buffer]]
        self._draw()

    def _draw(self) -> None:
        generator = torch.Generator().manual_seed(self._seed)
        for right in self._right.values():
            right.copy_(torch.randn(right.shape, generator=generator, dtype=torch.float64))

    def _matrices(self, buffers: Sequence[FlatBuffer]) -> list[Tensor]:
        return [buffer.weights[leaf.name].grad for buffer in buffers for leaf in self._leaves[buffer]]

    def all_reduce(self, buffers: Sequence[FlatBuffer]) -> Messages:
        """See `Lossy.all_reduce`."""
        found = self._matrices(buffers)
        for matrix in found:
            matrix.add_(self._errors[matrix])
        left = [matrix @ self._right[matrix] for matrix in found]
        others = [
            buffer.weights[leaf.name].grad
            for buffer in buffers
            for leaf in buffer.layout.leaves
            if leaf not in self._leaves[buffer]
        ]
        yield self.comm.all_reduce([*left, *others], purpose=PURPOSE, async_op=True)
        left = [torch.linalg.qr(factor).Q for factor in left]
        right = [torch.mm(matrix.t(), factor) for matrix, factor in zip(found, left, strict=True)]
        for matrix, p, q in zip(found, left, right, strict=True):
            torch.addmm(matrix, p, q.t(), alpha=-1, out=self._errors[matrix])
            if self.keeps_sent:
                self._sent[matrix] = p, q.clone(), self._right[matrix].clone()
        if not found:
            return DONE
        yield self.comm.all_reduce(right, purpose=PURPOSE, async_op=True)
        for matrix, p, q in zip(found, left, right, strict=True):
            torch.mm(p, q.t(), out=matrix)
            self._right[matrix].copy_(q)
        return DONE

    def take_back(self) -> None:
        """See `Lossy.take_back`."""
        for matrix, (p, q, before) in self._sent.items():
            self._errors[matrix].addmm_(p, q.t())
            self._right[matrix].copy_(before)
        self._sent.clear()

    def forget(self) -> None:
        """See `Lossy.forget`. The last Q are no more finite than the gradients were: they are drawn anew."""
        for error in self._errors.values():
            error.zero_()
        self._draw()

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """See `Lossy.kept`."""
        for name, error, right in zip(self._names, self._errors.values(), self._right.values(), strict=True):
            yield f"error of {name}", error
            yield f"factor of {name}", right


class TopK:
    """The elements of largest magnitude of each buffer, values and places, go to all members, who add them up in rank
    order; of its own, a rank keeps the others as its error (Stich et al. 2018, sparsified SGD with memory)."""

    def __init__(self, buffers: Sequence[FlatBuffer], comm: Comm, fraction: float) -> None:
        self.comm, self.fraction, self.keeps_sent = comm, fraction, False
        self._errors = {buffer: torch.zeros_like(buffer.gradients) for buffer in buffers}
        self._sent: dict[FlatBuffer, tuple[Tensor, Tensor]] = {}  # places and values

    def all_reduce(self, buffers: Sequence[FlatBuffer]) -> Messages:
        """See `Lossy.all_reduce`."""
        sent = [self._largest(buffer) for buffer in buffers]
        every = [mine.new_empty(self.comm.size, mine.numel()) for mine in sent]
        yield self.comm.all_gather([mine.view(1, -1) for mine in sent], out=every, purpose=PURPOSE, async_op=True)
        for buffer, rows in zip(buffers, every, strict=True):
            buffer.gradients.zero_()
            for row in rows:
                places, values = row.chunk(2)
                buffer.gradients.index_add_(0, places, values.view(buffer.gradients.dtype))
        return DONE

    def _largest(self, buffer: FlatBuffer) -> Tensor:
        """Places and values in one tensor of whole numbers; the rest of the gradients becomes the error."""
        gradients, error = buffer.gradients, self._errors[buffer]
        error.add_(gradients)
        places = torch.topk(error.abs(), num_largest(buffer.layout, self.fraction), sorted=False).indices
        values = error[places]
        error[places] = 0.0
        if self.keeps_sent:
            self._sent[buffer] = places, values
        whole = torch.int32 if gradients.dtype == torch.float32 else torch.int64
        return torch.cat([places.to(whole), values.view(whole)])

    def take_back(self) -> None:
        """See `Lossy.take_back`."""
        for buffer, (places, values) in self._sent.items():
            self._errors[buffer][places] = values
        self._sent.clear()

    def forget(self) -> None:
        """See `Lossy.forget`."""
        for error in self._errors.values():
            error.zero_()

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """See `Lossy.kept`."""
        for buffer, error in self._errors.items():
            yield f"error of {buffer.layout.name}", error


def wire(layout: Layout) -> Wire:
    """How gradients travel where each is sent."""
    if layout.reduce in ("bf16", "fp16"):
        return Rounded(torch.bfloat16 if layout.reduce == "bf16" else torch.float16)
    return Exact()


def lossy(layout: Layout, buffers: Sequence[FlatBuffer], comm: Comm, seed: int) -> Lossy | None:
    """What sends a part of the gradients only, if the layout asks for that."""
    if comm.size == 1:
        return None
    if layout.reduce == "powersgd":
        return PowerSGD(buffers, comm, layout.reduce_rank, seed)
    return TopK(buffers, comm, layout.reduce_fraction) if layout.reduce == "top-k" else None
