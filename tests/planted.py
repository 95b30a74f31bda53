"""Mistakes that real trainers have made, each planted into the running engine; `verify` must find every one.

A plant takes `patch(object, name, value)`, the test's `monkeypatch.setattr` or plain `setattr`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from phalanx.plan import shards
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer import dropout, engine, initial, optim, record
from phalanx.trainer.data_parallel import DataParallel
from phalanx.trainer.engine import Engine
from phalanx.trainer.optim import AdamW
from phalanx.trainer.pipeline_parallel import Pipeline

Patch = Callable[[Any, str, Any], None]


def missing_norm_gradient_sum(patch: Patch) -> None:
    """Under sequence parallelism each rank's norms saw only its slice of the tokens."""
    sums = Engine._sum_copies

    def all_but_norms(self: Engine, copies: str, group: str, purpose: str) -> None:
        if group != "tensor":
            sums(self, copies, group, purpose)

    patch(Engine, "_sum_copies", all_but_norms)


def norm_counted_twice(patch: Patch) -> None:
    """Every tensor rank adds its copies of replicated weights to the global norm."""

    def all_copies(slices: Any, first_replica: bool) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        if first_replica:
            for part in slices:
                total += torch.linalg.vector_norm(part.gradients).double().square()
        return total

    patch(engine, "squared_norm", all_copies)


def tied_copy_not_summed(patch: Patch) -> None:
    """Each copy of a tied embedding gets the gradient of its own use only."""
    patch(Engine, "synchronize", lambda self: None)


def gradients_times_micro_batches(patch: Patch) -> None:
    """The loss shown is divided by the micro-batches, the one that backward starts from is not."""
    whole = Engine.forward_backward

    def multiplied(self: Engine, batches: Any) -> Any:
        loss = whole(self, batches)
        for part in self.data.slices:
            part.gradients.mul_(len(batches))
        return loss

    patch(Engine, "forward_backward", multiplied)


def swapped_kv_copies(patch: Patch) -> None:
    """The copies of kv heads go round the tensor ranks in turn instead of side by side."""
    cut = shards._Cutter.cut

    def in_turn(self: Any, leaf: str, parameter: Any, dim: int, *, copies: int = 1) -> Any:
        draft = cut(self, leaf, parameter, dim, copies=copies)
        if copies == 1:
            return draft
        size = parameter.shape[dim] * copies // self.size
        first = self.index % (self.size // copies) * size
        start, stop = list(draft.rectangle.start), list(draft.rectangle.stop)
        start[dim], stop[dim] = first, first + size
        return dataclasses.replace(draft, rectangle=shards.Rectangle(start=tuple(start), stop=tuple(stop)))

    patch(shards._Cutter, "cut", in_turn)


def stale_zero_gather(patch: Patch) -> None:
    """Parameters are gathered before the update: of the others' shards a rank has those of the step before."""

    def too_early(self: Engine, rate: float, coefficient: float) -> None:
        self.data.gather_parameters()
        self.data.wait_for_parameters()
        self.optimizer.step(rate, coefficient)

    patch(Engine, "update", too_early)


def decay_on_norms(patch: Patch) -> None:
    """All parameters decay."""

    def all_decay(self: AdamW, *, decayed: bool) -> list[int]:
        return [index for index, master in enumerate(self.masters) if master.numel()] if decayed else []

    patch(optim.AdamW, "_members", all_decay)


def average_instead_of_sum(patch: Patch) -> None:
    """Gradients are averaged over the data axis although the loss was divided by the tokens of the whole batch."""
    finish = DataParallel.finish

    def averaged(self: DataParallel) -> None:
        finish(self)
        for part in self.slices:
            part.gradients.div_(self.shards.size * self.replicas.size)

    patch(DataParallel, "finish", averaged)


def one_micro_batch_dropped(patch: Patch) -> None:
    """The second micro-batch has a forward and no backward."""
    backward = Pipeline._backward

    def all_but_one(self: Pipeline, step: Any, action: Any, arrived: Any) -> None:
        if action.micro_batch == 1:
            step.kept.pop((action.chunk, action.micro_batch))
        else:
            backward(self, step, action, arrived)

    patch(Pipeline, "_backward", all_but_one)


def mask_drawn_per_rank(patch: Patch) -> None:
    """Tensor ranks draw different dropout masks for an activation that all of them hold."""
    whole, keep_mask = Engine.__init__, dropout.keep_mask

    def seeded(self: Engine, plan: Plan, coord: Any, *rest: Any) -> None:
        whole(self, plan, coord, *rest)
        patch(dropout, "keep_mask", lambda key, *where: keep_mask(key ^ coord.tensor, *where))

    patch(Engine, "__init__", seeded)


def wrong_token_count(patch: Patch) -> None:
    """Each data rank divides by its own supervised tokens: a mean of means."""
    cut = Engine.micro_batches

    def own_count(self: Engine, tokens: Any, labels: Any, num_supervised: int, *others: Any) -> Any:
        return cut(self, tokens, labels, int((labels >= 0).sum()) * self.plan.layout.data, *others)

    patch(Engine, "micro_batches", own_count)


def unequal_initial_copies(patch: Patch) -> None:
    """The head's copy of a tied embedding is drawn on its own."""
    fill = initial.fill

    def own_seed(buffer: Any, seed: int) -> None:
        fill(buffer, seed + (buffer.layout.name == "head"))

    patch(engine, "fill", own_seed)


def record_with_a_bug(plan: Plan, run_dir: RunDir) -> None:
    """An entry for the agent: the ranks of a layout, not the one process, count norms twice."""
    if plan.layout.num_ranks > 1:
        norm_counted_twice(setattr)
    record.record(plan, run_dir)
