"""The models of examples/own, a residual network, a vision transformer and a Llama of `transformers`, and an adapter of
`peft` on it: cut over processes, each has the loss and the gradients that it has alone, and learns."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from own_modules import first_step, load_kernels_without_data, on_ranks, relative, step_in
from torch import Tensor, nn

from phalanx.own.blocks import Blocks
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.spec.job import JobSpec, OptimizerSpec
from phalanx.trainer.world import World

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "own"))
import digits
import llama
import vision_transformer as vit

load_kernels_without_data()


def plan_of(layout: Layout, global_batch: int, num_steps: int = 1, lr: float = 1e-2) -> ModulePlan:
    job = JobSpec(
        global_batch=global_batch, seq_len=1, num_steps=num_steps, precision="fp32", optimizer=OptimizerSpec(lr=lr)
    )
    return ModulePlan(job=job, layout=layout)


def hold(layout: Layout, make: Any, batch: Any, loss: Any, alone: Any, **options: Any) -> None:
    """`alone(module)` is the loss that one process has."""
    size = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
    found, gradients = on_ranks(layout, first_step, plan_of(layout, size), make, batch, loss, options)[0]
    module = make()
    expected = alone(module)
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == trained.keys()
    total = torch.cat([parameter.grad.flatten() for parameter in trained.values()]).norm()
    for name, parameter in trained.items():
        distance = float((gradients[name] - parameter.grad).norm())
        assert distance < 1e-5 * float(parameter.grad.norm()) or distance < 2**-23 * total, name


def resnet() -> nn.Module:
    torch.manual_seed(1)
    return digits.ResNet()


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    images, labels = digits.training()
    return images[:size], labels[:size]


def in_micro_batches(module: nn.Module) -> Tensor:
    """The batch norms of a residual network see one micro-batch at a time."""
    images, labels = batch_of(32)
    pieces = zip(images.split(8), labels.split(8), strict=True)
    return sum(vit.cross_entropy(module(some), (some, theirs)) for some, theirs in pieces) / 4


def test_resnet_has_the_gradients_of_one_process() -> None:
    hold(Layout(data=4, zero=1, micro_batch=8), resnet, batch_of(32), vit.cross_entropy, in_micro_batches)


def course(world: World, plan: ModulePlan, make: Any, options: Any) -> list[float]:
    """Losses of training, and at its end the share of mistakes on what is held out."""
    step, losses = step_in(world, make(), plan, **options), []
    for batch in digits.batches(num_steps=plan.job.num_steps, size=plan.job.global_batch):
        losses.append(step.forward_backward(step.share(batch), vit.cross_entropy))
        step.update()
    return [*losses, step.evaluate(step.share(digits.held_out()), vit.wrong)]


def hold_course(layout: Layout, make: Any, **options: Any) -> None:
    """As on one process with the same micro-batches, and downhill."""
    there, here = (
        on_ranks(each, course, plan_of(each, 64, num_steps=15, lr=3e-3), make, options)[0]
        for each in (Layout(micro_batch=layout.micro_batch), layout)
    )
    assert here[:-1] == pytest.approx(there[:-1], rel=1e-2)
    assert here[:5] == pytest.approx(there[:5], rel=1e-4)
    assert here[-2] < here[0] - 0.05
    if not any(isinstance(part, nn.BatchNorm2d) for part in make().modules()):  # whose statistics lag behind at first
        assert abs(here[-1] - there[-1]) < 0.05


def test_resnet_learns_on_four_processes_as_on_one() -> None:
    hold_course(Layout(data=4, zero=1, micro_batch=16), resnet)


def transformer() -> nn.Module:
    torch.manual_seed(1)
    return vit.VisionTransformer()


def test_vision_transformer_in_two_stages() -> None:
    layout = Layout(pipeline=2, data=2, zero=2, micro_batch=4)
    batch = batch_of(16)
    hold(
        layout,
        transformer,
        batch,
        vit.cross_entropy,
        lambda module: vit.cross_entropy(module(batch[0]), batch),
        blocks=Blocks(path="blocks"),
    )


def test_vision_transformer_learns_in_two_stages_as_in_one() -> None:
    hold_course(Layout(pipeline=2, data=2, zero=2, micro_batch=16), transformer, blocks=Blocks(path="blocks"))


def make_llama() -> nn.Module:
    torch.manual_seed(1)
    return llama.llama()


def tokens() -> dict[str, Tensor]:
    return {"input_ids": llama.text()["input_ids"][:8]}


def llama_alone(module: nn.Module) -> Tensor:
    return module(**tokens(), labels=tokens()["input_ids"]).loss


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2, data=2, micro_batch=2),
        Layout(pipeline=2, data=2, micro_batch=2, zero=3, recompute="full"),
        Layout(pipeline=2, schedule="zb-h1", micro_batch=2),
    ],
    ids=str,
)
def test_llama_of_transformers_in_two_stages(layout: Layout) -> None:
    hold(layout, make_llama, tokens(), llama.next_token, llama_alone, blocks=llama.BLOCKS)


def adapted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what peft imports and calls
        import peft

        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        model = peft.get_peft_model(make_llama(), settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at first, and so would be the gradients of A
                parameter.normal_(0, 0.02, generator=generator)
    return model


def on_logits(output: Any, batch: Any) -> Any:
    return llama.next_token(output.logits, batch)


def test_an_adapter_of_peft_trains_alone() -> None:
    adapted()  # imports, before ranks are forked
    hold(Layout(data=2, zero=3, micro_batch=2), adapted, tokens(), on_logits, llama_alone)


def adapter_state(world: World, plan: ModulePlan) -> tuple[int, dict[str, Tensor]]:
    step = step_in(world, adapted(), plan)
    step.forward_backward(step.share(tokens()), on_logits)
    step.update()
    return sum(moment.numel() for pair in step.engine.optimizer.moments for moment in pair), step.state_dict()


def test_frozen_weights_have_no_state() -> None:
    module = adapted()
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    num_state, weights = on_ranks(Layout(), adapter_state, plan_of(Layout(micro_batch=8), 8))[0]
    assert num_state == 2 * trained
    for name, parameter in module.named_parameters():
        assert weights[name].equal(parameter) != parameter.requires_grad, name
    assert (
        relative(weights["base_model.model.lm_head.weight"], module.get_parameter("base_model.model.lm_head.weight"))
        == 0
    )
