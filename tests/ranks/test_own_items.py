"""Losses that say how many items they go over: updates follow the mean of all of them, and a step without any neither
changes a weight nor spends what a reduction keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_modules import images, module_plan, on_ranks, relative, small, step_in
from torch import Tensor

from phalanx.own.step import Step
from phalanx.plan.layout import Layout, Reduce
from phalanx.plan.module import ModulePlan
from phalanx.trainer.world import World

SUPERVISED = [(0, 2, 3, 4, 5), (1,), tuple(range(8))]
"""In each of three steps, which of eight samples count."""


def counted(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum over supervised samples, and how many they are."""
    labels = batch[1]
    return F.cross_entropy(output, labels, ignore_index=-100, reduction="sum"), (labels >= 0).sum()


def supervised(number: int, samples: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    inputs, labels = images(number)
    left_out = [place for place in range(len(labels)) if place not in samples]
    labels[left_out] = -100
    return inputs, labels


def three_steps(world: World, plan: ModulePlan) -> tuple[list[float], dict[str, Tensor]]:
    step, losses = step_in(world, small(), plan), []
    for number, samples in enumerate(SUPERVISED):
        losses.append(step.forward_backward(step.share(supervised(number, samples)), counted))
        step.update()
    return losses, step.state_dict()


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """The same with torch, each batch in one forward."""
    module, losses = small(), []
    decayed = [[each for each in module.parameters() if (each.dim() > 1) == decays] for decays in (True, False)]
    groups = [{"params": some, "weight_decay": decay} for some, decay in zip(decayed, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for number, samples in enumerate(SUPERVISED):
        inputs, labels = supervised(number, samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs), labels, ignore_index=-100)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def test_updates_follow_the_mean_of_the_items_of_each_step() -> None:
    """Were they sums, the step with one item would count an eighth of one with eight: moments remember."""
    layout = Layout(data=2, micro_batch=2, zero=1)
    losses, weights = alone()
    found, ours = on_ranks(layout, three_steps, module_plan(layout))[0]
    assert found == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        assert relative(ours[name], value) < 1e-4, name


def kept(step: Step) -> list[Tensor]:
    assert step.engine.data.lossy
    return [tensor.clone() for _, tensor in step.engine.data.lossy.kept()]


def keeping(world: World, plan: ModulePlan) -> list[list[Tensor]]:
    """What a lossy reduction keeps after a step, after one without items, and after one more."""
    step, states = step_in(world, small(), plan), []
    for number, samples in enumerate([tuple(range(8)), (), tuple(range(8))]):
        step.forward_backward(step.share(supervised(number, samples)), counted)
        assert step.update().updated == bool(samples)
        states.append(kept(step))
    return states


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("reduce", ["powersgd", "top-k"])
def test_a_step_without_items_spends_nothing_of_what_a_reduction_keeps(reduce: Reduce, zero: int) -> None:
    """Top-k takes back what it sent to the last bit, PowerSGD to that of a product."""
    layout = Layout(data=2, micro_batch=2, zero=zero, reduce=reduce, reduce_rank=2, reduce_fraction=0.1)
    for before, after, later in on_ranks(layout, keeping, module_plan(layout)):
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old, new) if reduce == "top-k" else torch.allclose(old, new, rtol=0.0, atol=1e-7)
        assert not all(map(torch.equal, after, later)) and any(tensor.norm() > 1e-3 for tensor in before)
