"""The loss against torch.nn.functional.cross_entropy and the formula of the z-loss, in float64, over cut and padded
vocabularies and several chunks. `test_layouts` holds it against one process over whole layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import run_worlds
from tiny import tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.plan.comm import Group
from phalanx.plan.layout import Layout
from phalanx.plan.traffic import HEAD_ROWS
from phalanx.trainer.comm import SoloComm
from phalanx.trainer.flat import Weight
from phalanx.trainer.loss import Objective, head_loss
from phalanx.trainer.tensor_parallel import TensorParallel
from phalanx.trainer.world import World

HIDDEN, VOCAB, PADDED = 16, 250, 256
NUM_TOKENS = HEAD_ROWS + 100
PLAIN = Objective(vocab=VOCAB)
BOTH = Objective(vocab=VOCAB, label_smoothing=0.2, z_loss=1e-2)
OBJECTIVES = [
    PLAIN,
    Objective(vocab=VOCAB, label_smoothing=0.1),
    Objective(vocab=VOCAB, z_loss=1e-4),
    BOTH,
]


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Activations, a table whose last rows are padding, and labels of which some are not supervised."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    table = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    table[VOCAB:] = 0.0
    labels = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    labels[torch.rand(NUM_TOKENS, generator=generator) < 0.3] = -100
    return inputs, table, labels


def expected(objective: Objective, num_supervised: int) -> tuple[float, Tensor, Tensor]:
    """Loss and both gradients, by autograd over the real rows."""
    inputs, table, labels = problem()
    inputs.requires_grad_()
    table.requires_grad_()
    logits = inputs @ table[:VOCAB].t()
    total = F.cross_entropy(logits, labels, label_smoothing=objective.label_smoothing, reduction="sum")
    total = total + objective.z_loss * torch.logsumexp(logits, 1)[labels >= 0].square().sum()
    loss = total / num_supervised
    loss.backward()
    assert inputs.grad is not None
    assert table.grad is not None
    return loss.item(), inputs.grad, table.grad


def ours(comm: Any, objective: Objective, num_supervised: int, labels: Tensor) -> tuple[float, Tensor, Tensor]:
    inputs, table, _ = problem()
    rows = PADDED // comm.size
    first = comm.index * rows
    mine = Weight(table[first : first + rows], torch.zeros(rows, HIDDEN, dtype=torch.float64))
    real = range(first, min(first + rows, VOCAB))
    loss = head_loss(inputs.requires_grad_(), mine, labels, real, num_supervised, objective, TensorParallel(comm))
    loss.backward()
    assert inputs.grad is not None
    return loss.item(), inputs.grad, mine.grad


def on_ranks(world: World, objective: Objective, num_supervised: int) -> tuple[float, Tensor, Tensor]:
    return ours(world.comm("tensor"), objective, num_supervised, problem()[2])


def alone() -> SoloComm:
    return SoloComm(Group(name="tensor", ranks=(0,)))


def close(value: Tensor, right: Tensor) -> bool:
    return bool((value - right).norm() <= 1e-10 * right.norm())


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_smoothing_spreads_over_the_ids_of_all_ranks(tensor: int, objective: Objective) -> None:
    """Over those alone: padding (250 → 256) gets no part of it and no gradient."""
    loss, input_grad, table_grad = expected(objective, 5000)
    results = run_worlds(Layout(tensor=tensor), on_ranks, objective, 5000, model=tiny_model())
    for value, gradient, _ in results:
        assert value == pytest.approx(loss, rel=1e-10)
        assert close(gradient, input_grad)
    whole = torch.cat([gradient for *_, gradient in results])
    assert close(whole, table_grad)
    assert whole[VOCAB:].eq(0).all()


def test_without_supervised_tokens_exactly_zero() -> None:
    loss, *gradients = ours(alone(), BOTH, 1, torch.full((NUM_TOKENS,), -100))
    assert loss == 0.0
    assert all(gradient.eq(0).all() for gradient in gradients)


def test_full_logits_never_exist() -> None:
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Largest():
        ours(alone(), BOTH, 1, problem()[2])
    assert largest == HEAD_ROWS * VOCAB
