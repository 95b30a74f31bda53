"""Step: the training of a module of the user's own, one optimizer step at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn

from phalanx.errors import InputError, RunError
from phalanx.own.engine import ModuleEngine
from phalanx.own.nest import Nest, mapped, samples, tensors
from phalanx.own.stage import Loss, ModuleBatch
from phalanx.own.whole import whole_state
from phalanx.plan.module import ModulePlan
from phalanx.rundir import RunDir
from phalanx.trainer.continuation import Continuation
from phalanx.trainer.guards import Guards, shared_texts
from phalanx.trainer.loop import Clock
from phalanx.trainer.optim import clip_coefficient, learning_rate
from phalanx.trainer.state import state
from phalanx.trainer.stop import StopRequest
from phalanx.trainer.world import World
from phalanx.watch.metrics import MetricsWriter, StepRecord

Unused = Literal["error", "zero"]


class Step:
    """What `phalanx.prepare` returns: call `forward_backward`, then `update`, on all ranks alike.

    `module` is the user's, its parameters moved into flat buffers; `number` counts the steps done, those before a
    checkpoint that the run goes on from included. After `forward_backward`, `loss` and `gradient_norm` are those of the
    global batch.
    """

    def __init__(
        self, world: World, plan: ModulePlan, engine: ModuleEngine, *, unused: Unused = "error", run_dir: RunDir | None
    ) -> None:
        """With a run folder, go on from its last checkpoint if it has one, save there, and write metrics."""
        self.world, self.plan, self.engine, self.module = world, plan, engine, engine.module
        self.loss = self.gradient_norm = math.nan
        self.number = 0
        self._unused = unused
        self._guards, self._clock = Guards(engine), Clock(world.recorder)
        self._batches: Sequence[ModuleBatch] | None = None
        self._spent: Sequence[float] = ()
        self._closing = ExitStack()
        self._continuation: Continuation | None = None
        self._stop: StopRequest | None = None
        self._metrics: MetricsWriter | None = None
        if engine.data.lossy:  # whether a step has items is known only once its gradients are reduced
            engine.data.lossy.keeps_sent = True
        if run_dir:
            self._keep(run_dir)

    def _keep(self, run_dir: RunDir) -> None:
        if self.world.rank == 0:
            self._closing.enter_context(run_dir.lock())
            self._metrics = MetricsWriter(run_dir.metrics, say)
        pieces = [*state(self.engine), *self.engine.pieces()]
        self._continuation = Continuation(self.engine, run_dir, say, pieces)
        self.number = self._continuation.restore()
        self._stop = StopRequest()

    def share(self, batch: Nest) -> list[Nest]:
        """This rank's micro-batches of a global batch, which all ranks hold: a nest of tensors with samples along dim
        0. Data coordinate i takes the i-th of equal parts, and cuts it into pieces of `layout.micro_batch` samples.

        Raises InputError if the samples cannot be dealt out evenly.
        """
        sizes = {tensor.shape[0] for tensor in tensors(batch) if tensor.dim()}
        layout = self.plan.layout
        if len(sizes) != 1:
            what = f"the tensors of the batch have {sorted(sizes) or 'no'} samples along dim 0"
            raise InputError(what, where="batch", instead="give all of them the same number, or cut the batch yourself")
        (size,) = sizes
        if size % layout.data:
            instead = "let the data loader drop the last, smaller batch (drop_last=True), or use another layout.data"
            raise InputError(f"{size} samples do not divide among data {layout.data}", where="batch", instead=instead)
        count = size // layout.data
        mine = samples(batch, self.world.coord.data * count, (self.world.coord.data + 1) * count)
        return [samples(mine, start, start + layout.micro_batch) for start in range(0, count, layout.micro_batch)]

    def forward_backward(self, micro_batches: Sequence[Nest], loss: Loss) -> float:
        """Gradients of the mean of `loss` over the items of all ranks' `micro_batches`, and that mean. All ranks of a
        data coordinate pass the same micro-batches, and all ranks equally many.

        `loss(output, micro_batch)` returns the mean over the micro-batch's samples, or a pair: the sum, and the number
        of items that it goes over. Raises RunError on all ranks if a parameter took no part, unless `prepare` was told
        that such ones have a gradient of zero.
        """
        self.world.recorder.step = self.number + 1
        self._batches = self._moved(micro_batches, loss)
        share = self.engine.forward_backward(self._batches)
        self.engine.synchronize()
        unused = self.engine.unused() if self._unused == "error" else []
        vote = self._stop.vote if self._stop else 0.0
        told = [float(len(unused)), vote, *self._clock.lap()]
        self.loss, self.gradient_norm, (num_unused, votes, *self._spent) = self.engine.totals(share, told)
        if self._stop:
            self._stop.count(votes)
        if num_unused:
            self._refuse(unused)
        return self.loss

    def update(self, rate: float | None = None) -> StepRecord:
        """New weights from the gradients of `forward_backward`, clipped as the plan says. `rate` takes the place of the
        plan's learning rate. With a run folder, save if a checkpoint is due.

        Raises RunError, or leaves out the update, if loss or gradients are no finite numbers, as `job.on_non_finite`
        says; Stopped, with everything saved, if the run was asked to stop.
        """
        if self._batches is None:
            raise InputError("there are no gradients", where="update", instead="call forward_backward first")
        optimizer = self.plan.job.optimizer
        if rate is None:
            rate = learning_rate(optimizer, self.number, self.plan.job.num_steps)
        loss_scale = self._batches[0].loss_scale
        finite = self._guards.allow_update(self._batches, self.loss, self.gradient_norm)
        updated = finite and self.engine.num_items > 0
        if updated:
            self.engine.update(rate, clip_coefficient(self.gradient_norm, optimizer.clip_norm))
        elif finite and self.engine.data.lossy:
            self.engine.data.lossy.take_back()
        self._batches = None
        self.number += 1
        record = self._record(rate, loss_scale, updated)
        if self._metrics:
            self._metrics.write(record)
        self._guards.after(self.number)
        self._save()
        return record

    def evaluate(self, micro_batches: Sequence[Nest], loss: Loss) -> float:
        """The mean of `loss` over all ranks' micro-batches, one or more on each, in evaluation mode and without
        gradients."""
        batches = self._moved(micro_batches, loss, validates=True)
        with _evaluating(self.module):
            total, count = self.engine.validate(batches)
        both = torch.stack([total, count])
        if self.world.coord.tensor:
            both.zero_()
        self.world.comm("world").all_reduce(both, purpose="validation loss")
        return float(both[0] / both[1]) if both[1] else math.nan

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers of the module, whole, on the CPU and in full precision, under the
        module's own names: on rank 0; other ranks, which must call it too, get an empty dict."""
        return whole_state(self.engine)

    def say(self, line: str) -> None:
        """Print a line, on rank 0 alone."""
        if self.world.rank == 0:
            say(line)

    def finish(self) -> None:
        """Save the last state, if there is a run folder and it is not saved yet."""
        if self._continuation:
            self._continuation.finish(self.number)

    def close(self) -> None:
        """Finish, and leave the other ranks in peace."""
        self.finish()
        self._closing.close()
        self.world.close()

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _moved(self, micro_batches: Sequence[Nest], loss: Loss, *, validates: bool = False) -> list[ModuleBatch]:
        if not micro_batches:
            where = "evaluate" if validates else "forward_backward"
            raise InputError("there is no micro-batch", where=where, instead="one or more on each rank")
        device, first = self.world.device, self.world.coord.data * len(micro_batches)
        return [
            ModuleBatch(
                values=mapped(lambda tensor: tensor.to(device, non_blocking=True), values),
                loss=loss,
                seed=(self.plan.job.seed, self.number, first + index),
                loss_scale=self.engine.loss_scale.value,
                validates=validates,
            )
            for index, values in enumerate(micro_batches)
        ]

    def _refuse(self, unused: Sequence[str]) -> None:
        mine = f"{', '.join(unused[:8])}{', …' if len(unused) > 8 else ''} took no part in the loss" if unused else ""
        raise RunError(
            f"step {self.number + 1}: {shared_texts(self.engine, mine)}. Use it (with blocks, in before or after: the "
            "module's own forward is not called), freeze it (requires_grad_(False)), or call prepare with "
            'unused="zero" if it is used at times'
        )

    def _record(self, rate: float, loss_scale: float, updated: bool) -> StepRecord:
        return StepRecord.measured(
            self._spent,
            num_ranks=self.plan.layout.num_ranks,
            tokens_per_step=self.plan.job.tokens_per_step,
            step=self.number,
            loss=self.loss,
            gradient_norm=self.gradient_norm,
            learning_rate=rate,
            skipped_steps=self._guards.num_skipped,
            loss_scale=loss_scale,
            updated=updated,
        )

    def _save(self) -> None:
        if self._continuation is None or self._stop is None:
            return
        self.world.recorder.micro_batch, self.world.recorder.phase = -1, "checkpoint"
        if self._stop.agreed and self.number < self.plan.job.num_steps:
            self._continuation.finish(self.number)
            stopped = self._stop.leave(self.number, "the same command")
            self.say(str(stopped))
            raise stopped
        self._continuation.after(self.number)


def say(line: str) -> None:
    """One line for a person."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards each part in the mode that it was in."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
