"""Copies: what all tensor ranks hold of a module, and whether they agree about it."""

from __future__ import annotations

import torch

from phalanx.errors import InputError
from phalanx.trainer.any_engine import AnyEngine
from phalanx.trainer.guards import found_anywhere

_TOLERANCE = 1e-3


def sum_copies(engine: AnyEngine) -> None:
    """Add up the gradients of parameters of which each tensor rank has seen its own heads or tokens only."""
    shared = [part.gradients for part in engine.data.slices if part.part.copies == "heads"]
    if shared:
        engine.comm("tensor").all_reduce(shared, purpose="shared gradients")


def check_copies(engine: AnyEngine) -> None:
    """See that the gradients of what all tensor ranks hold have the same norm on all of them: else the table of cuts is
    wrong. Raises InputError, on all ranks, with the parameters."""
    text, comm = "", engine.comm("tensor")
    held = [
        (piece.parameter.name, part.gradients[stretch].double().norm())
        for part in engine.data.slices
        if part.part.copies == "tensor"
        for piece, _, stretch in part.rectangles()
    ]
    if held:
        mine = torch.stack([norm for _, norm in held]).unsqueeze(0)
        every = mine.new_empty(comm.size, len(held))
        comm.all_gather(mine, out=every, purpose="check of cuts")
        differ = (every - every[0]).abs().amax(0) > _TOLERANCE * every.amax(0)
        text = ", ".join(name for (name, _), wrong in zip(held, differ.tolist(), strict=True) if wrong)
    found = found_anywhere(engine, text, purpose="check of cuts")
    if found:
        what = f"tensor ranks have different gradients of what all of them hold: {found}"
        instead = '"heads" for what each rank uses for its heads alone, "row" after "column"'
        raise InputError(what, where="cuts", instead=instead)
