"""Trainer: the whole training of a module, from its data to its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import default_collate

from phalanx.data.order import sample_ids
from phalanx.errors import DataError
from phalanx.own.nest import Nest, mapped, tensors
from phalanx.own.prepare import prepare
from phalanx.own.stage import Loss
from phalanx.own.step import Step
from phalanx.plan.module import ModulePlan
from phalanx.watch.metrics import StepRecord
from phalanx.watch.progress import Progress


class Dataset(Protocol):
    """Samples by number, as torch.utils.data.Dataset has them."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, number: int) -> Any:
        """One of them."""


class Trainer:
    """Trains `module` on `data` as `plan` says. `step` is what `phalanx.prepare` returns.

    `data`: a tensor, or a tuple or dict of tensors, with samples along dim 0; or a Dataset, whose samples `collate`
    puts together. Which sample comes at which place of which step follows from `job.seed` alone: each sample once per
    epoch, in an order of its own, whatever the layout and wherever the run goes on.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        data: Nest | Dataset,
        plan: ModulePlan,
        *,
        run_dir: Path | str | None = None,
        collate: Callable[[list[Any]], Nest] = default_collate,
        **options: Any,
    ) -> None:
        """`options` are those of `prepare`. Raises DataError if the data are not samples, at least one, and what
        `prepare` raises."""
        self._loss, self._data, self._collate = loss, data, collate
        whole = isinstance(data, (Tensor, tuple, dict))
        single = [tensor for tensor in tensors(data) if not tensor.dim()] if whole else []
        if single:
            what = f"{len(single)} of the data's tensors hold one number ({single[0].item()}), not samples along dim 0"
            raise DataError(what, instead="a tensor with a row for each sample, or the number in the loss")
        sizes = {len(tensor) for tensor in tensors(data)} if whole else {len(data)}
        if len(sizes) != 1 or sizes == {0}:
            raise DataError(f"the data have {sorted(sizes)} samples", instead="equally many of each, at least one")
        (self.num_samples,) = sizes
        self._whole = whole
        self.step: Step = prepare(module, plan, run_dir=run_dir, **options)

    def run(self, after_step: Callable[[StepRecord], None] = lambda record: None) -> None:
        """Train to `job.num_steps`; rank 0 says how it goes, and `after_step` hears of each step on all ranks.

        Asked to stop (SIGTERM, SIGUSR1), it saves and raises Stopped, which ends the program with its exit code.
        """
        step, job = self.step, self.step.plan.job
        progress = Progress(job.num_steps, job.log_every_steps)
        while step.number < job.num_steps:
            step.forward_backward(self.micro_batches(step.number), self._loss)
            record = step.update()
            if line := progress.line(record):
                step.say(line)
            after_step(record)
        step.finish()
        if summary := progress.summary():
            step.say(summary)

    def micro_batches(self, number: int) -> list[Nest]:
        """What this rank trains on in step `number`."""
        job, size = self.step.plan.job, self.step.plan.layout.micro_batch
        ids = sample_ids(job.seed, number, job.global_batch, self.num_samples)[list(self.step.engine.positions)]
        return [self._read(ids[start : start + size].tolist()) for start in range(0, len(ids), size)]

    def _read(self, ids: Sequence[int]) -> Nest:
        if self._whole:
            return mapped(lambda tensor: tensor[list(ids)], self._data)
        return self._collate([self._data[number] for number in ids])
