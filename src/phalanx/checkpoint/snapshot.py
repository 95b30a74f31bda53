"""A copy of live state in host memory, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.checkpoint.tensor_file import Piece
from phalanx.plan.shards import Parameter, Rectangle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A piece whose tensor is ours."""

    kind: str
    parameter: Parameter
    rectangle: Rectangle
    tensor: Tensor
    owned: bool


class Snapshot:
    """Host memory for the values of `pieces`; kept from save to save, since fresh memory costs as much as the copy. For
    values on a GPU it is page-locked, which they reach several times as fast."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._live = tuple(pieces)
        self.pieces = tuple(
            _Copy(
                kind=piece.kind,
                parameter=piece.parameter,
                rectangle=piece.rectangle,
                tensor=torch.empty(
                    piece.rectangle.shape, dtype=piece.tensor.dtype, pin_memory=piece.tensor.device.type == "cuda"
                ),
                owned=piece.owned,
            )
            for piece in self._live
        )
        self._gpus = {piece.tensor.device for piece in self._live if piece.tensor.device.type == "cuda"}

    def take(self) -> tuple[Piece, ...]:
        """Copy all values as they are now; returns the copies, which stay until the next `take`."""
        for live, copy in zip(self._live, self.pieces, strict=True):
            copy.tensor.copy_(live.tensor, non_blocking=True)
        for gpu in self._gpus:  # once for all; the next step may overwrite what was copied
            torch.cuda.current_stream(gpu).synchronize()
        return self.pieces
