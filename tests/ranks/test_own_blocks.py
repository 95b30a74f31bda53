"""A module that names its blocks, cut into stages of a pipeline, trains as it does alone in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import RankFailed
from own_modules import (
    BLOCKS,
    WIDTH,
    cross_entropy,
    decoder,
    first_step,
    gradients_of,
    images,
    load_kernels_without_data,
    module_plan,
    on_ranks,
    relative,
    step_in,
    trained_alone,
)
from tiny import tiny_model
from torch import Tensor, nn

from phalanx.errors import InputError
from phalanx.own.blocks import Blocks
from phalanx.own.prepare import prepare
from phalanx.own.whole import module_weights
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.rundir import RunDir
from phalanx.trainer.world import World

load_kernels_without_data()


def train(
    world: World, plan: ModulePlan, make: Any, blocks: Blocks
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], float]:
    step = step_in(world, make(), plan, blocks=blocks)
    losses, gradients = [], {}
    for number in range(2):
        losses.append(step.forward_backward(step.share(images(number)), cross_entropy))
        if not number:
            gradients = gradients_of(step)
        step.update()
    held_out = step.evaluate(step.share(images(5)), cross_entropy)
    return losses, gradients, step.state_dict(), held_out


def alone(make: Any) -> tuple[list[float], dict[str, Tensor], float]:
    losses, gradients, module = trained_alone(make, 2)
    module.eval()
    return losses, gradients, cross_entropy(module(images(5)[0]), images(5)).item()


def hold(layout: Layout, make: Any, blocks: Blocks, **options: Any) -> None:
    losses, gradients, held_out = alone(make)
    found = on_ranks(layout, train, module_plan(layout), make, blocks, **options)
    for ours, _, _, evaluated in found:
        assert ours == pytest.approx(losses, rel=1e-4)
        assert ours[0] == pytest.approx(losses[0], rel=1e-5)
        assert evaluated == pytest.approx(held_out, rel=1e-3)
    assert found[0][1].keys() == gradients.keys()
    for name, gradient in found[0][1].items():
        assert relative(gradient, gradients[name]) < 1e-5, name


LAYOUTS = {
    "one process": Layout(micro_batch=2, recompute="full"),
    "data 2, zero 3, recompute": Layout(data=2, micro_batch=2, zero=3, recompute="full"),
    "pipeline 2": Layout(pipeline=2, micro_batch=2),
    "pipeline 3, recompute": Layout(pipeline=3, micro_batch=2, recompute="full"),
    "pipeline 2 × data 2, zero 2": Layout(pipeline=2, data=2, micro_batch=2, zero=2),
    "pipeline 2 × data 2, zero 3": Layout(pipeline=2, data=2, micro_batch=1, zero=3, recompute="full"),
    "interleaved": Layout(pipeline=2, virtual_stages=3, schedule="interleaved-1f1b", micro_batch=1),
    "zb-h1": Layout(pipeline=2, schedule="zb-h1", micro_batch=2, data=2, zero=1),
    "zb-v": Layout(pipeline=2, virtual_stages=2, schedule="zb-v", micro_batch=1),
    "dualpipe-v": Layout(pipeline=2, virtual_stages=2, schedule="dualpipe-v", micro_batch=1),
    "ends without blocks": Layout(pipeline=4, stage_layers=(0, 6, 0, 0), micro_batch=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_stages_train_as_torch_alone(layout: Layout) -> None:
    hold(layout, decoder, BLOCKS)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, WIDTH),
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))),
        nn.Linear(WIDTH, 5),
    )


def test_a_sequential_needs_no_more_than_the_path() -> None:
    hold(Layout(pipeline=2, micro_batch=2), plain, Blocks(path="2"))


def frozen_start() -> nn.Module:
    module = decoder()
    module.token.requires_grad_(False)
    module.model.enter.requires_grad_(False)
    for layer in module.model.layers[:3]:
        layer.requires_grad_(False)
    return module


def test_a_stage_may_have_nothing_to_train() -> None:
    layout = Layout(pipeline=2, micro_batch=2)
    module = frozen_start()
    loss = cross_entropy(module(images()[0]), images())
    loss.backward()
    batch, options = images(), {"blocks": BLOCKS}
    found, gradients = on_ranks(layout, first_step, module_plan(layout), frozen_start, batch, cross_entropy, options)[0]
    assert found == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        assert (name in gradients) == parameter.requires_grad
        assert name not in gradients or relative(gradients[name], parameter.grad) < 1e-5, name


def noisy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, WIDTH), nn.Sequential(*(Noise() for _ in range(4))), nn.Linear(WIDTH, 5)
    )


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + F.dropout(self.inner(inputs), 0.5, self.training)


def noisy_loss(world: World, plan: ModulePlan) -> float:
    step = step_in(world, noisy(), plan, blocks=Blocks(path="2"))
    before = torch.random.get_rng_state()
    loss = step.forward_backward(step.share(images()), cross_entropy)
    assert torch.random.get_rng_state().equal(before)  # what the user draws is the user's
    return loss + 0 * step.gradient_norm + step.gradient_norm


def test_dropout_does_not_depend_on_the_layout() -> None:
    layouts = [
        Layout(micro_batch=2),
        Layout(data=2, micro_batch=2, zero=3, recompute="full"),
        Layout(pipeline=2, data=2, micro_batch=2, recompute="full"),
    ]
    first, *others = [on_ranks(layout, noisy_loss, module_plan(layout))[0] for layout in layouts]
    assert others == pytest.approx([first, first], rel=1e-5)


def tied() -> nn.Module:
    """The first and the last layer have one weight."""
    torch.manual_seed(0)
    middle = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 16, bias=False), middle, nn.Linear(16, 16, bias=False))
    module[3].weight = module[1].weight
    return module


@pytest.mark.parametrize(
    "layout",
    [Layout(pipeline=2, micro_batch=2), Layout(pipeline=3, data=2, micro_batch=2, zero=1), Layout(micro_batch=8)],
    ids=str,
)
def test_both_ends_may_share_a_weight(layout: Layout) -> None:
    hold(layout, tied, Blocks(path="2"), model=tiny_model(tied=True))


def kept(world: World, plan: ModulePlan, folder: Path, frozen: bool) -> tuple[float, dict[str, Tensor]]:
    module = tied()
    module[1].weight.requires_grad_(not frozen)
    step = step_in(world, module, plan, blocks=Blocks(path="2"), run_dir=RunDir(folder))
    loss = step.forward_backward(step.share(images(step.number)), cross_entropy)
    step.update()
    step.finish()
    return loss, step.state_dict()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_shared_weight_is_kept_once(frozen: bool, tmp_path: Path) -> None:
    stages, alone = Layout(pipeline=2, micro_batch=2), Layout(micro_batch=8)
    plans = [module_plan(layout, num_steps=2, check_copies_every_steps=1) for layout in (stages, stages, alone)]
    model = tiny_model(tied=True)
    for folder in ("stages", "alone"):
        on_ranks(stages, kept, plans[0], tmp_path / folder, frozen, model=model)
    (loss, weights), _ = on_ranks(stages, kept, plans[1], tmp_path / "stages", frozen, model=model)
    assert on_ranks(alone, kept, plans[2], tmp_path / "alone", frozen)[0][0] == pytest.approx(loss, rel=1e-5)
    stored = module_weights(tmp_path / "stages" / "checkpoints" / "step-000002")
    assert stored.keys() == weights.keys() == dict(tied().named_parameters()).keys()
    assert all(stored[name].equal(value) for name, value in weights.items())


def tied_in_the_middle() -> nn.Module:
    module = tied()
    module[2][2].weight = module[1].weight
    return module


def complex_valued() -> nn.Module:
    module = plain()
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return module


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (tied_in_the_middle, "1.weight of stage 0 and 2.2.weight of stage 1 are one parameter"),
        (complex_valued, "phase is of type torch.complex64"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_ranks_meet(make: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        prepare(make(), module_plan(Layout(pipeline=2, micro_batch=4)), blocks="2")


class ByValue(Noise):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 2 if inputs.sum().item() > 0 else inputs


def by_value() -> nn.Module:
    module = plain()
    module[2][0] = ByValue()
    return module


def refused(world: World, plan: ModulePlan, make: Any, path: str, size: int) -> None:
    step = step_in(world, make(), plan, blocks=Blocks(path=path))
    inputs, labels = images(size=size)
    step.forward_backward([(inputs[:4], labels[:4]), (inputs[4:], labels[4:])], cross_entropy)


def reads_the_start(module: Any, state: Any, batch: Any) -> Tensor:
    return module.head((module.model.norm(state["hidden"]) + module.token).mean(1))


def elsewhere(world: World, plan: ModulePlan) -> None:
    step = step_in(world, decoder(), plan, blocks=replace(BLOCKS, after=reads_the_start))
    step.forward_backward(step.share(images()), cross_entropy)


def keywords(world: World, plan: ModulePlan) -> None:
    step = step_in(world, plain(), plan, blocks=Blocks(path="2"))
    step.forward_backward([{"images": images()[0]}] * 2, cross_entropy)


@pytest.mark.parametrize(
    ("function", "args", "text"),
    [
        (refused, (by_value, "2", 8), r"let nothing between the stages depend on values \(.item\(\)"),
        (refused, (plain, "3", 8), "Sequential has no list of modules named 3"),
        (refused, (plain, "2", 7), r"micro-batch 1 has tensors of shapes \[\[3, 1, 4, 4\], \[3\]\]"),
        (elsewhere, (), "what comes after the blocks reads a parameter that is registered before them"),
        (keywords, (), r"Blocks\(path, before=lambda module, batch"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words(function: Any, args: Any, text: str) -> None:
    layout = Layout(pipeline=2, micro_batch=4)
    with pytest.raises(RankFailed, match=text) as caught:
        on_ranks(layout, function, module_plan(layout), *args)
    assert isinstance(caught.value.cause, InputError)
