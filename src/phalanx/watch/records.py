"""RankRecord: what one rank read, computed and held in the first steps of a run, for comparing runs of two layouts.

`trainer.record` fills it in, `studies.compare` holds it against another layout's. One file per rank, written whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Moment = Literal["initial weights", "gradients", "last weights", "before decay", "after decay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One step as a rank saw it. `loss` and `gradient_norm` are those of the whole batch, `clip_coefficient` is what
    gradients were multiplied by. `sequences` are the places in the global batch that it trained on, in order, and
    `digests` hash what stood there, tokens and labels."""

    loss: float
    gradient_norm: float
    learning_rate: float
    clip_coefficient: float
    sequences: tuple[int, ...]
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """The values of one box, `start` up to `stop`, of the global tensor `name` (of that `shape`)."""

    moment: Moment
    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    values: Array

    @property
    def box(self) -> tuple[slice, ...]:
        """For indexing the global tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """All that one rank recorded. Between the moments "before decay" and "after decay" lies one update with all
    gradients and moments zero, at learning rate `decay_rate`: weight decay alone."""

    rank: int
    steps: tuple[StepFacts, ...]
    pieces: tuple[TensorPiece, ...]
    decay_rate: float

    def of(self, moment: Moment) -> Iterator[TensorPiece]:
        """The pieces of one moment."""
        return (piece for piece in self.pieces if piece.moment == moment)

    def write(self, path: Path) -> None:
        """One file: the values as arrays, all else as JSON beside them."""
        pieces = [
            {"moment": piece.moment, "name": piece.name, "shape": piece.shape, "start": piece.start, "stop": piece.stop}
            for piece in self.pieces
        ]
        steps = [asdict(step) for step in self.steps]
        facts = {"rank": self.rank, "steps": steps, "pieces": pieces, "decay_rate": self.decay_rate}
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {str(number): piece.values for number, piece in enumerate(self.pieces)}
        with path.open("wb") as file:
            np.savez(file, facts=np.array(json.dumps(facts)), **arrays)  # type: ignore[arg-type]  # names are digits

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        """Read what `write` wrote."""
        with np.load(path) as arrays:
            facts = json.loads(str(arrays["facts"]))
            pieces = tuple(
                TensorPiece(
                    moment=piece["moment"],
                    name=piece["name"],
                    shape=tuple(piece["shape"]),
                    start=tuple(piece["start"]),
                    stop=tuple(piece["stop"]),
                    values=arrays[str(number)],
                )
                for number, piece in enumerate(facts["pieces"])
            )
        steps = tuple(
            StepFacts(**{**step, "sequences": tuple(step["sequences"]), "digests": tuple(step["digests"])})
            for step in facts["steps"]
        )
        return cls(rank=facts["rank"], steps=steps, pieces=pieces, decay_rate=facts["decay_rate"])
