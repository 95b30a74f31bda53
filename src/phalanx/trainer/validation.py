"""Validation: the loss on data that are not trained on, over all of it, however much that is."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.data.prefetch import Batches
from phalanx.plan.comm import Work
from phalanx.trainer.engine import Engine
from phalanx.trainer.stop import StopRequest
from phalanx.watch.metrics import StepRecord


class Validation:
    """Validates as `job.data` says; all ranks make the same calls."""

    def __init__(self, engine: Engine, source: Batches, stop: StopRequest) -> None:
        self._engine, self._source, self._stop = engine, source, stop
        self._job, self._world = engine.plan.job, engine.comm("world")

    def due(self, step: int) -> bool:
        """Whether to validate after so many steps."""
        every = self._job.data.validate_every_steps
        scheduled = step == self._job.num_steps or (every > 0 and step % every == 0)
        return scheduled and self._source.num_rounds > 0 and not self._stop.agreed

    def add_to(self, record: StepRecord) -> StepRecord:
        """`record` with the loss of validation, unless somebody asked to stop meanwhile."""
        began = time.perf_counter()
        loss = self.loss()
        if loss is None:
            return record
        return replace(record, validation_loss=loss, validation_s=time.perf_counter() - began)

    def loss(self) -> float | None:
        """The mean of the cross-entropy over all supervised tokens, the same bits on all ranks; None if this rank or
        another was asked to stop meanwhile.

        It goes in rounds of one global batch, the last one filled up with sequences in which nothing is supervised, so
        that every rank does the same whatever the size of the set. The message of a round travels during the next one,
        so that a pipeline does not run empty between them.
        """
        total = torch.zeros(3, dtype=torch.float64)
        under_way: tuple[Tensor, Work] | None = None
        for number in range(self._source.num_rounds):
            numbers = self._round(number)
            total += _arrived(under_way)
            if total[2]:
                self._stop.count(total[2].item())
                return None
            under_way = numbers, self._world.all_reduce(numbers, purpose="validation loss", async_op=True)
        total += _arrived(under_way)
        summed, num_supervised, votes = total.tolist()
        self._stop.count(votes)
        return summed / num_supervised if num_supervised else math.nan

    def _round(self, number: int) -> Tensor:
        """This rank's part of a round: summed loss, supervised tokens, and its vote to stop. Ranks that hold the same
        numbers count once."""
        engine = self._engine
        batch = self._source.validation(number, list(engine.positions))
        loss = engine.validate(engine.read(batch, 0, validates=True))
        counts = engine.coord.tensor == 0 and engine.coord.pipeline == 0
        numbers = loss.new_tensor([0.0, batch.num_supervised if counts else 0, self._stop.vote])
        if engine.coord.tensor == 0:
            numbers[0] = loss
        return numbers


def _arrived(under_way: tuple[Tensor, Work] | None) -> Tensor:
    if under_way is None:
        return torch.zeros(3, dtype=torch.float64)
    numbers, work = under_way
    work.wait()
    return numbers.cpu()
