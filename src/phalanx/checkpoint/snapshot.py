"""A copy of live state in host memory, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.checkpoint.tensor_file import StatePiece


class Snapshot:
    """Host memory for the values of `pieces`; kept from save to save, since fresh memory costs as much as the copy. For
    values on a GPU it is page-locked, which they reach several times as fast."""

    def __init__(self, pieces: Iterable[StatePiece]) -> None:
        self._live = tuple(pieces)
        self.pieces = tuple(replace(piece, tensor=_room(piece.tensor)) for piece in self._live)
        self._gpus = {piece.tensor.device for piece in self._live if piece.tensor.device.type == "cuda"}

    def take(self) -> tuple[StatePiece, ...]:
        """Copy all values as they are now; returns the copies, which stay until the next `take`."""
        for live, copy in zip(self._live, self.pieces, strict=True):
            copy.tensor.copy_(live.tensor, non_blocking=True)
        for gpu in self._gpus:  # once for all; the next step may overwrite what was copied
            torch.cuda.current_stream(gpu).synchronize()
        return self.pieces


def _room(live: Tensor) -> Tensor:
    return torch.empty(live.shape, dtype=live.dtype, pin_memory=live.device.type == "cuda")
