"""Action: one thing a pipeline coordinate does for one micro-batch; Transfer: what it hands to a neighbour stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActionKind = Literal["forward", "backward", "input_gradient", "weight_gradient"]

FORWARD_CHANNEL = 0
BACKWARD_CHANNEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """`kind` for micro-batch `micro_batch` on this pipeline coordinate's model chunk `chunk`.

    "backward" computes all gradients at once; "input_gradient" and "weight_gradient" are its two halves, of which only
    the first is waited for by the stage before (Zero Bubble, arXiv 2401.10241).
    """

    kind: ActionKind
    micro_batch: int
    chunk: int = 0

    @property
    def adds_gradients(self) -> bool:
        """Whether it adds to the gradients of its chunk's weights."""
        return self.kind in ("backward", "weight_gradient")

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} of micro-batch {self.micro_batch} on chunk {self.chunk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One tensor that stage `stage` waits for: activations from the stage before it (forward channel), or the gradient
    of its output from the stage after it (backward channel).

    `source` and `destination` are pipeline coordinates; order is first in, first out per (source, destination,
    channel).
    """

    source: int
    destination: int
    channel: int
    micro_batch: int
    stage: int

    @property
    def local(self) -> bool:
        """Whether both stages live on one coordinate, so that nothing is sent."""
        return self.source == self.destination

    def __str__(self) -> str:
        what = "activations" if self.channel == FORWARD_CHANNEL else "gradient"
        return (
            f"{what} of micro-batch {self.micro_batch} for stage {self.stage} "
            f"(pipeline coordinate {self.source} → {self.destination})"
        )
