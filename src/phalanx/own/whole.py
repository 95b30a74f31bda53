"""A module's tensors made whole again, from the slices that ranks hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.reshard import read_pieces
from phalanx.checkpoint.store import opened
from phalanx.checkpoint.tensor_file import DTYPES, StatePiece
from phalanx.errors import CheckpointError
from phalanx.own.engine import ModuleEngine
from phalanx.plan.module import STATE_KINDS, ModulePlan, ModuleTensor
from phalanx.trainer.state import state


def whole_state(engine: ModuleEngine) -> dict[str, Tensor]:
    """All parameters and persistent buffers, whole, on rank 0; all ranks call it."""
    kept = {"weight", "frozen", "buffer"}
    pieces = [piece for piece in (*state(engine), *engine.pieces()) if piece.kind in kept]
    return _whole(engine, engine.plan.tensors, pieces)


def whole_gradients(engine: ModuleEngine) -> dict[str, Tensor]:
    """The gradients of the global mean loss, whole, on rank 0; all ranks call it after `totals`."""
    held = [
        StatePiece(
            kind="gradient",
            parameter=piece.parameter,
            rectangle=box,
            tensor=(part.gradients[stretch] * engine.correction).view(box.shape),
            owned=engine.data.first_replica and part.part.counted,
        )
        for part in engine.data.slices
        for piece, box, stretch in part.rectangles()
    ]
    return _whole(engine, [tensor for tensor in engine.plan.tensors if tensor.role == "trained"], held)


def _whole(engine: ModuleEngine, wanted: Iterable[ModuleTensor], pieces: Iterable[StatePiece]) -> dict[str, Tensor]:
    """Tensors put together on rank 0 from the pieces that ranks own, by name, one after another. Each rank adds what it
    owns to zeros, in float64, which holds every value of the others exactly."""
    world, found = engine.comm("world"), {}
    mine: dict[str, list[StatePiece]] = {}
    for piece in pieces:
        if piece.owned:
            mine.setdefault(piece.parameter.name, []).append(piece)
    for tensor in wanted:
        values = torch.zeros(tensor.parameter.shape, dtype=torch.float64, device=engine.device)
        for piece in mine.get(tensor.name, ()):
            values[piece.rectangle.index] = piece.tensor.double()
        world.all_reduce(values, purpose="whole tensors")
        if world.index == 0:
            found[tensor.name] = values.to("cpu", engine.kept_dtype(tensor)).view(tensor.shape)
    return found


def module_weights(folder: Path | str) -> dict[str, Tensor]:
    """What a checkpoint (runs/…/checkpoints/step-…) holds of a module: parameters and persistent buffers, whole, under
    the module's own names, for `module.load_state_dict`. No other process is needed.

    Raises CheckpointError for a checkpoint that is damaged or not of a module.
    """
    path = Path(folder)
    manifest, plan = opened(path)
    if not isinstance(plan, ModulePlan):
        instead = "phalanx checkpoint export writes it as a Hugging Face folder"
        raise CheckpointError("is no checkpoint of a module of Python", where=str(path), instead=instead)
    dtypes = {(entry.kind, entry.name): entry.dtype for entry in manifest.tensors}
    pieces = []
    for tensor in plan.tensors:
        kind = STATE_KINDS[tensor.role][0]
        empty = torch.empty(tensor.parameter.shape, dtype=DTYPES[dtypes[kind, tensor.name]])
        pieces.append(StatePiece.whole(tensor.parameter, empty, kind=kind))
    read_pieces(path, manifest, pieces)
    return {tensor.name: piece.tensor.view(tensor.shape) for tensor, piece in zip(plan.tensors, pieces, strict=True)}
