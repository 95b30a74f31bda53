"""What a run must keep to go on: rectangles of named global tensors, whatever the layout that holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from phalanx.plan.shards import Parameter, Rectangle
from phalanx.trainer.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """A view of live state: `tensor` holds `rectangle` of the global tensor of `kind` for `parameter`.

    Kinds: "weight" (master weights where compute is narrower), "exp_avg" and "exp_avg_sq" (AdamW's moments). `owned`:
    this rank is the one that writes it; of all copies of a rectangle, exactly one is owned.
    """

    kind: str
    parameter: Parameter
    rectangle: Rectangle
    tensor: Tensor
    owned: bool


def state(engine: Engine) -> Iterator[StatePiece]:
    """All pieces that this rank holds of weights and optimizer state; writing into their tensors restores them.

    After that, `engine.publish()` carries restored master weights to where forward reads them.
    """
    for part, tensors in zip(engine.data.slices, engine.optimizer.state(), strict=True):
        for piece, box, stretch in part.rectangles():
            for kind, flat in tensors.items():
                yield StatePiece(
                    kind=kind,
                    parameter=piece.parameter,
                    rectangle=box,
                    tensor=flat[stretch].view(box.shape),
                    owned=engine.data.first_replica and part.part.counted,
                )
