"""Checks that all ranks take together, so that none goes on where another stops."""

from __future__ import annotations

import math

import torch

from phalanx.errors import RunError
from phalanx.trainer.engine import Engine


def check_finite(engine: Engine, loss: float, norm: float) -> None:
    """Stop all ranks alike if the global loss or gradient norm is not a finite number; weights are still untouched.

    `loss` and `norm` are the same on all ranks, so all agree. Raises RunError naming the ranks whose own gradients are
    not finite, and on those the first parameter.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    place = engine.comm("world")
    mine = first_not_finite(engine)
    flags = torch.zeros(place.size)
    place.all_gather(torch.tensor([float(mine is not None)]), out=flags, purpose="non-finite ranks")
    ranks = [rank for rank, flag in zip(place.group.ranks, flags.tolist(), strict=True) if flag]
    here = f"; here first in {mine}" if mine else ""
    raise RunError(
        f"loss {loss} and gradient norm {norm} are not both finite numbers: gradients of rank"
        f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks)) or '(none)'}{here}. No weight was changed; "
        "a lower learning rate or a longer warm-up helps against divergence"
    )


def first_not_finite(engine: Engine) -> str | None:
    """The name of the first parameter on this rank whose gradient holds a number that is not finite."""
    for part in engine.data.slices:
        for piece, _, stretch in part.rectangles():
            if not part.gradients[stretch].isfinite().all():
                return piece.parameter.name
    return None
