"""A module of the user's own over the data axis trains as it does alone in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_modules import (
    cross_entropy,
    gradients_of,
    images,
    module_plan,
    on_ranks,
    relative,
    small,
    step_in,
    trained_alone,
)
from torch import Tensor

from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.trainer.world import World


def train(
    world: World, plan: ModulePlan, make: Any = small
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of three steps, the gradients of the first, and the weights after the last."""
    if world.rank:
        torch.manual_seed(77)  # rank 0's weights count
    step = step_in(world, make() if not world.rank else make().apply(_spoil), plan)
    losses, gradients = [], {}
    for number in range(3):
        losses.append(step.forward_backward(step.share(images(number)), cross_entropy))
        if not number:
            gradients = gradients_of(step)
        step.update()
    return losses, gradients, step.state_dict()


def _spoil(module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.fill_(3.0)


LAYOUTS = {
    "one process": Layout(micro_batch=2),
    "data 2": Layout(data=2, micro_batch=2),
    "data 2, small buckets": Layout(data=2, micro_batch=1, bucket_bytes=64),
    "data 2, zero 1": Layout(data=2, micro_batch=2, zero=1),
    "data 4, zero 2": Layout(data=4, micro_batch=1, zero=2),
    "data 4, zero 3": Layout(data=4, micro_batch=1, zero=3),
    "data 4, zero 3 within 2": Layout(data=4, micro_batch=1, zero=3, zero_group=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_train_as_torch_alone(layout: Layout) -> None:
    expected = trained_alone(small, 3)
    for rank, (losses, gradients, weights) in enumerate(on_ranks(layout, train, module_plan(layout))):
        assert losses == pytest.approx(expected[0], rel=1e-4)
        assert losses[0] == pytest.approx(expected[0][0], rel=1e-5)
        if rank == 0:
            assert gradients.keys() == expected[1].keys()
            for name, gradient in gradients.items():
                assert relative(gradient, expected[1][name]) < 1e-5, name
            for name, value in weights.items():
                assert relative(value, expected[2].state_dict()[name]) < 1e-3, name


def test_float64_agrees_to_its_own_precision() -> None:
    layout = Layout(data=2, micro_batch=2, zero=3)
    expected = trained_alone(small, 3, torch.float64)
    losses, gradients, _ = on_ranks(layout, train, module_plan(layout, precision="fp64"))[0]
    assert losses[0] == pytest.approx(expected[0][0], rel=1e-12)
    assert all(relative(gradients[name], expected[1][name]) < 1e-12 for name in gradients)


def test_bf16_keeps_masters_and_gradients_in_fp32() -> None:
    layout = Layout(data=2, micro_batch=2, zero=3)
    expected = trained_alone(small, 3)
    losses, gradients, weights = on_ranks(layout, train, module_plan(layout, precision="bf16"))[0]
    assert losses == pytest.approx(expected[0], rel=2e-2)
    assert all(relative(gradients[name], expected[1][name]) < 5e-2 for name in gradients)
    assert {value.dtype for value in weights.values()} == {torch.float32}
