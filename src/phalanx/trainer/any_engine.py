"""AnyEngine: what the engines of models and of modules have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.plan.comm import Comm
from phalanx.plan.layout import Coord
from phalanx.plan.module import ModulePlan
from phalanx.plan.plan import Plan
from phalanx.trainer.data_parallel import DataParallel
from phalanx.trainer.flat import FlatBuffer
from phalanx.trainer.loss_scale import LossScale
from phalanx.trainer.optim import AdamW


class AnyEngine(Protocol):
    """`trainer.engine.Engine` or `own.engine.ModuleEngine`: all that guards and checkpoints ask of one. A batch is what
    the engine itself takes."""

    coord: Coord
    device: torch.device
    comm: Callable[[str], Comm]
    buffers: list[FlatBuffer]
    data: DataParallel
    optimizer: AdamW
    loss_scale: LossScale

    @property
    def plan(self) -> Plan | ModulePlan:
        """What it trains."""

    def run_alone(self, batch: Any) -> Tensor:
        """Forward and backward of one micro-batch, as if the step had no other. Returns this rank's share of the
        loss."""

    def totals(self, loss: Tensor, extra: Sequence[float] = ()) -> tuple[float, float, list[float]]:
        """Loss and gradient norm of the whole, and the sum of each number in `extra`, the same on all ranks."""

    def publish(self) -> None:
        """Carry master weights to where forward reads them on all ranks."""
