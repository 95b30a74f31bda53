"""An Engine in this very process, and the global tensors that its slices are parts of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx.plan.comm import Group
from phalanx.plan.layout import Coord
from phalanx.plan.plan import Plan
from phalanx.trainer.comm import SoloComm
from phalanx.trainer.data_parallel import Slice
from phalanx.trainer.engine import Engine


def solo_engine(plan: Plan) -> Engine:
    """The plan's engine, on one rank."""
    return Engine(plan, Coord(), lambda name: SoloComm(Group(name=name, ranks=(0,))), torch.device("cpu"))


def batch(plan: Plan, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and labels of one global batch: int64 [global batch, seq_len] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (plan.job.global_batch, plan.job.seq_len + 1)
    samples = torch.randint(0, plan.model.vocab, shape, generator=generator)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def masked_batch(plan: Plan, step: int) -> tuple[Tensor, Tensor, int]:
    """Sequence i supervises its first 3 i + 1 tokens (so sequences differ), one micro-batch nothing at all."""
    tokens, labels = batch(plan, seed=step)
    for index, row in enumerate(labels):
        row[0 if index == 2 else 3 * index + 1 :] = -100
    return tokens, labels, int((labels >= 0).sum())


def document_positions(plan: Plan, step: int) -> Tensor | None:
    """Where documents of 1 to 12 tokens begin anew: int64 [global batch, seq_len]; None where the job joins them."""
    if plan.job.data.documents == "joined":
        return None
    generator = torch.Generator().manual_seed(100 + step)
    rows = []
    for _ in range(plan.job.global_batch):
        lengths = torch.randint(1, 13, (plan.job.seq_len,), generator=generator).tolist()
        rows.append(torch.cat([torch.arange(length) for length in lengths])[: plan.job.seq_len])
    return torch.stack(rows)


def collect(slices: Iterable[Slice], which: str) -> dict[str, Tensor]:
    """Global tensors by name, put together from the `which` ("parameters", "gradients") of slices."""
    tensors: dict[str, Tensor] = {}
    for part in slices:
        flat = getattr(part, which)
        for piece, box, stretch in part.rectangles():
            name, shape = piece.parameter.name, piece.parameter.shape
            whole = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=flat.dtype))
            place = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            whole[place] = flat[stretch].view(box.shape)
    return tensors
