"""What a user's own loop may rely on: means over unequal counts, clipping, unused and frozen parameters, buffers, ties,
and checkpoints that go on with another layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import RankFailed
from own_modules import (
    Small,
    cross_entropy,
    first_step,
    gradients_of,
    images,
    module_plan,
    on_ranks,
    relative,
    small,
    step_in,
)
from torch import Tensor, nn

from phalanx.checkpoint.store import opened
from phalanx.errors import InputError, LayoutError
from phalanx.own.prepare import prepare
from phalanx.own.stage import drawing
from phalanx.own.whole import module_weights
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.rundir import RunDir
from phalanx.spec.job import CheckpointSpec
from phalanx.trainer.world import World


def counted(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum over supervised samples, and how many they are."""
    _, labels = batch
    return F.cross_entropy(output, labels, ignore_index=-100, reduction="sum"), (labels >= 0).sum()


def masked() -> tuple[Tensor, Tensor]:
    """Of eight samples, five of the first six count: no two micro-batches of two have the same number."""
    inputs, labels = images(3)
    labels[[1, 6, 7]] = -100
    return inputs, labels


def one_step(world: World, plan: ModulePlan, loss: Any) -> tuple[float, float, dict[str, Tensor]]:
    step = step_in(world, small(), plan)
    mean = step.forward_backward(step.share(masked()), loss)
    gradients = gradients_of(step)
    step.update()
    return mean, step.gradient_norm, gradients


@pytest.mark.parametrize("layout", [Layout(data=4, micro_batch=1, zero=2), Layout(data=2, micro_batch=2)], ids=str)
def test_unequal_counts_give_the_global_mean(layout: Layout) -> None:
    module = small()
    inputs, labels = masked()
    expected = F.cross_entropy(module(inputs), labels, ignore_index=-100)
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), torch.inf)
    mean, found_norm, gradients = on_ranks(layout, one_step, module_plan(layout), counted)[0]
    assert mean == pytest.approx(expected.item(), rel=1e-5)
    assert found_norm == pytest.approx(norm.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        assert relative(gradients[name], parameter.grad) < 1e-5, name


def without_items(world: World, plan: ModulePlan) -> tuple[float, bool]:
    """A step in which nothing counts: its mean, and whether the weights are those of before."""
    step = step_in(world, small(), plan)
    before = [parameter.detach().clone() for parameter in step.module.parameters()]
    inputs, labels = images(3)
    mean = step.forward_backward(step.share((inputs, labels.fill_(-100))), counted)
    step.update()
    return mean, all(torch.equal(a, b) for a, b in zip(before, step.module.parameters(), strict=True))


def test_a_step_without_items_changes_no_weight() -> None:
    layout = Layout(data=2, micro_batch=2)
    assert on_ranks(layout, without_items, module_plan(layout)) == [(0.0, True)] * 2


def test_what_is_drawn_follows_from_run_step_and_place() -> None:
    def drawn(*seed: int) -> list[float]:
        with drawing(seed):
            return torch.rand(3).tolist()

    outside = torch.get_rng_state()
    seeds = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]
    first = [drawn(*seed) for seed in seeds]
    assert [drawn(*seed) for seed in seeds] == first
    assert len({tuple(values) for values in first}) == 4
    assert torch.equal(torch.get_rng_state(), outside)


class Partly(Small):
    """One of the blocks is used by data that says so, one linear layer never; the head is shared with a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) * self.scale
        for number, block in enumerate(self.blocks):
            if number or images[0, 0, 0, 0] > 0:
                tokens = block(tokens)
        return self.head(tokens.mean(1))


def partly() -> nn.Module:
    torch.manual_seed(0)
    return Partly()


def with_unused(layout: Layout, unused: str) -> dict[str, Tensor]:
    options = {"unused": unused}
    return on_ranks(layout, first_step, module_plan(layout), partly, signed(), cross_entropy, options)[0][1]


def signed() -> tuple[Tensor, Tensor]:
    """The first data rank of two skips the first block, the second one does not."""
    inputs, labels = images()
    inputs[:, 0, 0, 0] = torch.tensor([-1.0] * 4 + [1.0] * 4)
    return inputs, labels


def test_unused_parameters_are_named_with_their_ranks() -> None:
    layout = Layout(data=2, micro_batch=4)
    with pytest.raises(RankFailed) as caught:
        with_unused(layout, "error")
    text = str(caught.value.cause)
    assert "spare.weight, spare.bias took no part in the loss (rank 1)" in text
    assert "blocks.0.norm.weight" in text and "(rank 0)" in text and 'unused="zero"' in text


@pytest.mark.parametrize("zero", [0, 2])
def test_data_may_decide_which_parts_run(zero: int) -> None:
    layout = Layout(data=2, micro_batch=4, zero=zero, bucket_bytes=64)
    module = partly()
    inputs, labels = signed()
    halves = [F.cross_entropy(module(inputs[part]), labels[part]) for part in (slice(0, 4), slice(4, 8))]
    (sum(halves) / 2).backward()
    gradients = with_unused(layout, "zero")
    for name, parameter in module.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert relative(gradients[name], expected) < 1e-5 or gradients[name].norm() == expected.norm() == 0, name


def test_under_zero_3_ranks_must_run_the_same_parts() -> None:
    layout = Layout(data=2, micro_batch=4, zero=3)
    with pytest.raises(RankFailed, match="must run the same parts of a module") as caught:
        with_unused(layout, "zero")
    assert isinstance(caught.value.cause, InputError)


@dataclass
class Answer:
    logits: Tensor
    note: str = ""


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, answer: Answer) -> Answer:
        return Answer(answer.logits + self.inner(answer.logits), answer.note)


class Keywords(nn.Module):
    """Keyword-only tensors in, a dataclass out, and through its blocks. One of them is called twice, the weight of the
    other is used outside of it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 6)
        self.blocks = nn.ModuleList(Answering() for _ in range(2))
        self.shared = self.blocks[1].inner.weight

    def forward(self, *, images: Tensor, labels: Tensor) -> Answer:
        answer = Answer(F.linear(self.enter(images.flatten(1)), self.shared))
        for block in (*self.blocks, self.blocks[0]):
            answer = block(answer)
        return answer


def keyword_step(world: World, plan: ModulePlan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    step = step_in(world, Keywords(), plan)
    inputs, labels = images()
    for _ in range(2):
        step.forward_backward(step.share({"images": inputs, "labels": labels}), of_answer)
    return gradients_of(step)


def of_answer(answer: Answer, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(answer.logits, batch["labels"])


@pytest.mark.parametrize("zero", [1, 3])
def test_keywords_and_dataclasses_are_taken_as_they_are(zero: int) -> None:
    layout = Layout(data=2, micro_batch=2, zero=zero)
    torch.manual_seed(0)
    module = Keywords()
    inputs, labels = images()
    of_answer(module(images=inputs, labels=labels), {"labels": labels}).backward()
    gradients = on_ranks(layout, keyword_step, module_plan(layout))[0]
    for name, parameter in module.named_parameters():
        assert relative(gradients[name], parameter.grad) < 1e-5, name


class Mixed(nn.Module):
    """A batch norm, a frozen layer, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 6, bias=False)  # before a batch norm a bias does nothing
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.blocks[2].weight = self.blocks[0].weight
        self.fixed = nn.Linear(6, 6).requires_grad_(False)
        self.leave = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.leave(self.fixed(self.blocks(self.norm(self.enter(images.flatten(1))))))


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


def mixed_run(
    world: World, plan: ModulePlan, folder: Path | None, stop_after: int, average: bool = True
) -> tuple[list[float], dict[str, Tensor]]:
    step = step_in(world, mixed(), plan, run_dir=folder and RunDir(folder), average_buffers=average)
    losses = []
    while step.number < stop_after:
        losses.append(step.forward_backward(step.share(images(step.number)), cross_entropy))
        step.update()
    step.finish()
    return losses, step.state_dict()


def test_frozen_tied_and_buffers() -> None:
    layout = Layout(data=2, micro_batch=4, zero=1)
    before, module = mixed().state_dict(), mixed()
    module(images(0)[0][:4])
    half = module.state_dict()
    module = mixed()
    module(images(0)[0][4:])
    other = module.state_dict()
    _, weights = on_ranks(layout, mixed_run, module_plan(layout), None, 1)[0]
    assert weights["fixed.weight"].equal(before["fixed.weight"])
    assert not weights["blocks.0.weight"].equal(before["blocks.0.weight"])
    assert "blocks.2.weight" not in weights
    mean = (half["norm.running_mean"] + other["norm.running_mean"]) / 2
    assert torch.allclose(weights["norm.running_mean"], mean)
    assert weights["norm.num_batches_tracked"] == 1
    _, weights = on_ranks(layout, mixed_run, module_plan(layout), None, 1, False)[0]
    assert torch.allclose(weights["norm.running_mean"], half["norm.running_mean"])


FIRST = Layout(data=2, micro_batch=2, zero=1)
LOSSY = Layout(data=2, micro_batch=2, reduce="powersgd", reduce_rank=1)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (FIRST, FIRST),
        (LOSSY, LOSSY),
        (FIRST, Layout(data=4, micro_batch=2, zero=3)),
        (FIRST, Layout(micro_batch=2)),
    ],
    ids=str,
)
def test_a_run_goes_on_with_another_layout(first: Layout, then: Layout, tmp_path: Path) -> None:
    plan = module_plan(first, num_steps=4, checkpoint=CheckpointSpec(every_steps=1))
    expected = on_ranks(first, mixed_run, plan, None, 4)[0]
    on_ranks(first, mixed_run, plan, tmp_path, 2)
    losses, weights = on_ranks(then, mixed_run, replace(plan, layout=then), tmp_path, 4)[0]
    same = then == first
    assert losses == pytest.approx(expected[0][2:], rel=0 if same else 1e-5)
    for name, value in weights.items():
        if same:
            assert value.equal(expected[1][name]), name
        elif not name.startswith(
            ("norm.running", "norm.num")
        ):  # how far statistics move depends on how often they are moved
            assert relative(value, expected[1][name]) < 1e-4, name

    manifest, written = opened(tmp_path / "checkpoints" / "step-000004")
    kinds = {(entry.kind, entry.name) for entry in manifest.tensors}
    assert ("frozen", "fixed.weight") in kinds and ("exp_avg", "fixed.weight") not in kinds
    assert isinstance(written, ModulePlan)
    kept = module_weights(tmp_path / "checkpoints" / "step-000004")
    assert kept.keys() == weights.keys() and all(kept[name].equal(weights[name]) for name in kept)
    mixed().load_state_dict(kept, strict=False)


def another(world: World, plan: ModulePlan, folder: Path) -> None:
    step_in(world, small(), plan, run_dir=RunDir(folder))


def test_a_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    layout = Layout(micro_batch=4)
    plan = module_plan(layout, num_steps=1)
    on_ranks(layout, mixed_run, plan, tmp_path, 1)
    with pytest.raises(RankFailed, match="missing: weight of scale") as caught:
        on_ranks(layout, another, plan, tmp_path)
    assert isinstance(caught.value.cause, InputError)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(data=2), "phalanx run --ranks 2"),
        (Layout(pipeline=2), 'blocks="model.layers"'),
        (Layout(tensor=2), "nothing says how the module is cut over the tensor axis"),
        (Layout(data=3), "does not divide global batch 8"),
        (Layout(recompute="full"), '"full" is not possible'),
    ],
)
def test_layouts_that_cannot_run_are_refused(layout: Layout, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        prepare(small(), module_plan(layout))


def not_finite(world: World, plan: ModulePlan) -> tuple[float, dict[str, Tensor]]:
    step = step_in(world, small(), plan)
    inputs, labels = images()
    inputs[5] = torch.inf
    step.forward_backward(step.share((inputs, labels)), cross_entropy)
    record = step.update()
    return record.skipped_steps, step.state_dict()


def test_a_step_without_finite_numbers_names_its_micro_batch_or_changes_nothing() -> None:
    layout = Layout(data=2, micro_batch=1)
    with pytest.raises(RankFailed, match=r"it comes from micro-batch 1 \(loss nan \(rank 1\)\)"):
        on_ranks(layout, not_finite, module_plan(layout))
    skipped, weights = on_ranks(layout, not_finite, module_plan(layout, on_non_finite="skip"))[0]
    assert skipped == 1
    assert all(weights[name].equal(value) for name, value in small().state_dict().items())


def refusals(world: World) -> list[str]:
    step, texts = step_in(world, small(), module_plan(Layout())), []
    for act in (
        step.update,
        lambda: step.forward_backward([], cross_entropy),
        lambda: step.evaluate([], cross_entropy),
        lambda: step.forward_backward([images()], lambda output, batch: output),
        lambda: step.share((torch.zeros(4, 2), torch.zeros(3))),
    ):
        with pytest.raises(InputError) as caught:
            act()
        texts.append(str(caught.value))
    return texts


def test_wrong_calls_are_refused_in_words() -> None:
    (texts,) = on_ranks(Layout(), refusals)
    words = ["call forward_backward first", "forward_backward: there is no micro-batch"]
    words += ["evaluate: there is no micro-batch", "the loss is a tensor of shape [8, 5]", "[3, 4] samples"]
    assert all(word in text for word, text in zip(words, texts, strict=True)), texts
