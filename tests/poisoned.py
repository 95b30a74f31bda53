"""Steps of the training loop before which something is done to a rank's engine, and all that an update changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from messages import Zeros
from single import batch
from torch import Tensor

from phalanx.trainer.engine import Engine
from phalanx.trainer.guards import Guards
from phalanx.trainer.loop import Clock, step
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.stop import StopRequest
from phalanx.watch.metrics import StepRecord


class Poisoned:
    """Batches of random tokens; `poison(engine, number)` is called before each."""

    def __init__(self, engine: Engine, poison: Callable[[Engine, int], None]) -> None:
        self.engine, self.poison = engine, poison

    def batch(self, number: int, positions: list[int]) -> Any:
        self.poison(self.engine, number)
        tokens, labels = batch(self.engine.plan, seed=number)
        whole = Zeros(self.engine.plan).batch(number, positions)
        whole.tokens[:], whole.labels[:] = tokens[positions].numpy(), labels[positions].numpy()
        return whole


def run(engine: Engine, source: Poisoned, guards: Guards, number: int) -> StepRecord:
    return step(engine, source, Clock(Recorder()), StopRequest(), guards, number)


def held(engine: Engine) -> list[Tensor]:
    """Everything that an update changes."""
    moments = [tensor.clone() for pair in engine.optimizer.moments for tensor in pair]
    masters = [master.clone() for master in engine.optimizer.masters]
    parameters = [part.parameters.clone() for part in engine.data.slices]
    return [*parameters, *masters, *moments, torch.tensor(engine.optimizer.num_steps)]
