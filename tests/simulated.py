"""All ranks of a layout inside one process, without communication: enough for what each rank holds of the state."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.folder import whole
from phalanx.checkpoint.parts import publish, write_part
from phalanx.checkpoint.reshard import read_pieces
from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.plan.comm import Group
from phalanx.plan.groups import groups
from phalanx.plan.plan import Plan
from phalanx.trainer.comm import SoloComm
from phalanx.trainer.engine import Engine
from phalanx.trainer.state import state


class SilentComm:
    """Knows its group and its place in it; to talk would be a mistake (there is no such method)."""

    def __init__(self, group: Group, index: int) -> None:
        self.group, self.index, self.size = group, index, group.size


def engines(plan: Plan) -> list[Engine]:
    """The engine of every rank."""
    return [_engine(plan, rank) for rank in range(plan.layout.num_ranks)]


def _engine(plan: Plan, rank: int) -> Engine:
    own = {group.name: group for group in groups(plan.model, plan.layout) if rank in group.ranks}

    def comm(name: str):
        group = own.get(name, Group(name=name, ranks=(rank,)))
        return SoloComm(group) if group.size == 1 else SilentComm(group, group.ranks.index(rank))

    return Engine(plan, plan.layout.coord(rank), comm, torch.device("cpu"))


def pieces_of(every: list[Engine]) -> list[list[StatePiece]]:
    """The state of every rank."""
    return [list(state(engine)) for engine in every]


def scramble(every: list[list[StatePiece]], seed: int) -> None:
    """Give every element of every global tensor a value of its own, the same on all ranks and in all layouts."""
    wholes: dict[tuple[str, str], Tensor] = {}
    for piece in (piece for pieces in every for piece in pieces):
        key = (piece.kind, piece.parameter.name)
        if key not in wholes:
            generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()) + seed)
            wholes[key] = torch.randn(piece.parameter.shape, generator=generator, dtype=piece.tensor.dtype)
        piece.tensor.copy_(wholes[key][piece.rectangle.index])


def gather(every: list[list[StatePiece]], *, owned: bool = True) -> dict[tuple[str, str], Tensor]:
    """The global tensors, by kind and name, from the pieces that are owned (or from all others)."""
    tensors: dict[tuple[str, str], Tensor] = {}
    for pieces in every:
        for piece in pieces:
            if piece.owned == owned:
                key = (piece.kind, piece.parameter.name)
                empty = torch.full(piece.parameter.shape, torch.nan, dtype=piece.tensor.dtype)
                tensors.setdefault(key, empty)[piece.rectangle.index] = piece.tensor
    return tensors


def write(folder: Path, plan: Plan, every: list[list[StatePiece]]) -> Path:
    """What `Saver` does, rank after rank."""
    aside = folder / "aside"
    aside.mkdir(parents=True)
    for rank, pieces in enumerate(every):
        write_part(aside, rank, 7, pieces)
    publish(aside, folder / "step-000007", plan, 7, {}, len(every))
    return folder / "step-000007"


def read(path: Path, every: list[list[StatePiece]]) -> None:
    for pieces in every:
        read_pieces(path, whole(path), pieces)


def assert_equal(
    have: dict[tuple[str, str], Tensor], want: dict[tuple[str, str], Tensor], *, partly: bool = False
) -> None:
    assert have if not partly else True
    assert partly or have.keys() == want.keys()
    for key, tensor in have.items():
        held = ~tensor.isnan() if partly else torch.ones_like(tensor, dtype=torch.bool)
        assert torch.equal(tensor[held], want[key][held]), key
