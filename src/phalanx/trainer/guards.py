"""Checks that all ranks make together, so that none goes on where another stops: whether loss and gradients are finite,
and whether what several ranks hold copies of is still the same on all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.agreement import texts
from phalanx.errors import RunError
from phalanx.plan.comm import Comm
from phalanx.trainer.any_engine import AnyEngine
from phalanx.watch.ranks import ranks_in_words

MAX_SKIPPED_IN_A_ROW = 10
"""Steps without finite numbers, one after another, that are skipped before a run is given up."""

_TEXT_BYTES = 256
_MAX_LISTED = 8
_CHUNK = 1 << 20
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guards:
    """The checks of one run. `num_skipped` counts the steps that were skipped since it began or went on."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine, self._job = engine, engine.plan.job
        self.num_skipped = self._in_a_row = 0

    def allow_update(self, batches: Sequence[Any], loss: float, norm: float) -> bool:
        """Whether the gradients of `batches` may change the weights: not if the global `loss` or gradient `norm` is no
        finite number and `job.on_non_finite` says to skip such a step. Gradients that overflow under a loss scale lower
        it, whatever the job says.

        Both are the same on all ranks, so all agree. Raises RunError, with one text on all ranks, if the job says to
        stop or too many steps were skipped in a row.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            self._engine.loss_scale.fitted()
            return True
        if math.isfinite(loss) and self._engine.loss_scale.lower():
            self.num_skipped += 1
            return False
        if self._job.on_non_finite == "skip" and self._in_a_row < MAX_SKIPPED_IN_A_ROW:
            self._in_a_row += 1
            self.num_skipped += 1
            if self._engine.data.lossy:
                self._engine.data.lossy.forget()
            return False
        found = shared_texts(self._engine, _not_finite(self._engine))
        raise RunError(
            f"loss {loss} and gradient norm {norm} are not both finite numbers: {found}; {self._culprit(batches)}. "
            + (
                f"{self._in_a_row} steps before this one were skipped. "
                if self._in_a_row
                else "No weight was changed; "
            )
            + "a lower learning rate or a longer warm-up helps against divergence"
            + ("" if self._in_a_row else ', job.on_non_finite = "skip" goes on without such steps')
        )

    def _culprit(self, batches: Sequence[Any]) -> str:
        """Which micro-batch it was, found by running each alone once more: everything in it can be repeated."""
        for number, batch in enumerate(batches):
            loss = self._engine.run_alone(batch)
            if not all(map(math.isfinite, self._engine.totals(loss)[:2])):
                where = shared_texts(self._engine, f"loss {loss.item()}" if not loss.isfinite() else "")
                return f"it comes from micro-batch {number}" + (f" ({where})" if where else "")
        return "no micro-batch does so when it runs alone once more, as after a fault of the hardware"

    def after(self, step: int) -> None:
        """After each step: compare copies if `job.check_copies_every_steps` says so."""
        every = self._job.check_copies_every_steps
        if every and step % every == 0:
            self.check_copies(step)

    def check_copies(self, step: int) -> None:
        """Hold the values that several ranks keep against each other, bit by bit, through one small message per group.

        These are the weights of all data ranks (under ZeRO 3, of the ranks that keep the same shard), what tensor ranks
        keep without cutting it, copies of kv heads and both ends of a tied embedding. Raises RunError on all ranks
        alike, with each parameter that differs and the ranks that differ from the first.
        """
        text = "; ".join(
            line for comm, pieces in _copies(self._engine) if comm.size > 1 for line in _differences(comm, pieces)
        )
        found = found_anywhere(self._engine, text, purpose="check of copies")
        if found:
            raise RunError(
                f"after step {step}, copies that should be equal are not: {found}. They are compared every "
                f"{self._job.check_copies_every_steps} steps: what was trained since the time before is doubtful"
            )


def _not_finite(engine: AnyEngine) -> str:
    """The first parameter on this rank whose gradient holds a number that is not finite; "" if there is none."""
    for part in engine.data.slices:
        for piece, _, stretch in part.rectangles():
            if not part.gradients[stretch].isfinite().all():
                return f"gradient of {piece.parameter.name}"
    return ""


Pieces = Iterable[tuple[str, Tensor]]


def _copies(engine: AnyEngine) -> Iterator[tuple[Comm, Pieces]]:
    """The groups that hold copies, and of what: names and equal tensors, in the same order on all members."""
    if engine.data.zero < 3:
        yield engine.comm("data"), _whole(engine)
    else:
        yield engine.data.replicas, _held(engine, ("none", "tensor", "heads", "kv", "tied"))
    yield engine.comm("tensor"), _held(engine, ("tensor", "heads"))
    yield engine.comm("kv"), _held(engine, ("kv",))
    yield engine.comm("tied"), list(_held(engine, ("tied",))) or _held(engine, ("none",), "embedding")


def _whole(engine: AnyEngine) -> Pieces:
    engine.data.wait_for_parameters()
    for buffer in engine.buffers:
        for piece in buffer.layout.pieces:
            yield piece.parameter.name, buffer.values(piece).view(-1)


def _held(engine: AnyEngine, copies: Sequence[str], buffer: str = "") -> Pieces:
    """What this rank updates of parts held in `copies`, of one buffer if it is named."""
    for part in engine.data.slices:
        if part.part.copies in copies and buffer in ("", part.buffer.layout.name):
            for piece, _, stretch in part.rectangles():
                yield piece.parameter.name, part.parameters[stretch]


def _differences(comm: Comm, pieces: Pieces) -> list[str]:
    """What is not the same on all members of a group, each with the ranks that differ from the first one."""
    held = [(name, checksum(values)) for name, values in pieces]
    if not held:  # as of a stage that is all cut: then no member has any
        return []
    names = [name for name, _ in held]
    mine = torch.stack([total for _, total in held]).unsqueeze(0)
    every = mine.new_empty(comm.size, len(names))
    comm.all_gather(mine, out=every, purpose="check of copies")
    unequal = (every != every[0]).cpu()
    return [
        f"{name} on rank {ranks_in_words([comm.group.ranks[m] for m in unequal[:, i].nonzero().flatten().tolist()])} "
        f"is not that of rank {comm.group.ranks[0]}"
        for i, name in enumerate(names)
        if unequal[:, i].any()
    ]


def checksum(values: Tensor) -> Tensor:
    """A scalar int64 of the bits of a flat tensor: the sum modulo 2⁶⁴ of each element's bits times an odd number of its
    own, which any change of one element changes. (High bits are laid over low ones first: alone, the highest of 64
    would count the same wherever it stands.)"""
    bits = values.detach().view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, bits.numel(), _CHUNK):
        some = bits[start : start + _CHUNK].to(torch.int64)
        some = some ^ (some >> 32)
        factors = torch.arange(start, start + some.numel(), device=values.device).mul_(0x1E3779B97F4A7C16).add_(1)
        total += (some * factors).sum()
    return total


def found_anywhere(engine: AnyEngine, mine: str, *, purpose: str) -> str:
    """As `shared_texts`, asked for only where some rank has found something: else one small message, and ""."""
    num_found = torch.tensor([float(bool(mine))], device=engine.device)
    engine.comm("world").all_reduce(num_found, purpose=purpose)
    return shared_texts(engine, mine) if num_found.item() else ""


def shared_texts(engine: AnyEngine, mine: str) -> str:
    """What each rank has to say, said by all of them: each has a few words for this rare case, "" says nothing."""
    said = texts(engine.comm("world"), mine, engine.device, num_bytes=_TEXT_BYTES, purpose="what was found")
    lines = [f"{text} (rank {ranks_in_words(ranks)})" for text, ranks in said.items()]
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "; ".join(lines[:_MAX_LISTED] + more)
