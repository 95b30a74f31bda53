"""What `plan.module_traffic` claims that a rank sends for a module of one's own equals what its Comms count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from own_modules import (
    BLOCKS,
    WIDTH,
    after,
    cross_entropy,
    decoder,
    images,
    load_kernels_without_data,
    module_plan,
    on_ranks,
    step_in,
)
from tiny import tiny_model
from torch import nn

from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.plan.module_traffic import module_traffic
from phalanx.trainer.world import World

load_kernels_without_data()


def counted(world: World, plan: ModulePlan, make: Any, options: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    step = step_in(world, make(), plan, **options)
    for number in range(2):
        world.recorder.reset()
        step.forward_backward(step.share(images(number)), cross_entropy)
        step.update()
    claim = {
        (message.group, message.purpose, message.operation): [message.count, message.payload_bytes]
        for message in module_traffic(step.plan, world.coord, step.engine.shape())
    }
    return claim, dict(world.recorder.messages)


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


LAYOUTS = {
    "data 2": (Layout(data=2, micro_batch=2, bucket_bytes=2048), "fp32"),
    "data 4, zero 1": (Layout(data=4, micro_batch=2, zero=1), "bf16"),
    "data 2, zero 2": (Layout(data=2, micro_batch=2, zero=2), "fp32"),
    "data 2, zero 3, recompute": (Layout(data=2, micro_batch=2, zero=3, recompute="full"), "bf16"),
    "pipeline 2 × data 2, zero 3": (Layout(pipeline=2, data=2, micro_batch=2, zero=3), "fp32"),
    "interleaved": (Layout(pipeline=2, virtual_stages=3, schedule="interleaved-1f1b", micro_batch=2), "fp64"),
    "zb-v": (Layout(pipeline=2, virtual_stages=2, schedule="zb-v", micro_batch=2), "fp32"),
}


@pytest.mark.parametrize(("layout", "precision"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_message_is_claimed_and_counted(layout: Layout, precision: str) -> None:
    plan = module_plan(layout, precision=precision)
    for rank, (claim, fact) in enumerate(on_ranks(layout, counted, plan, decoder, {"blocks": BLOCKS})):
        assert fact == claim, f"rank {rank}"


def shared() -> nn.Module:
    module = decoder()
    module.leave = nn.Linear(4, WIDTH)
    module.leave.weight = module.model.enter.weight
    return module


def with_leave(module: Any, state: Any, batch: Any) -> Any:
    return after(module, state, batch) + (module.leave.weight.sum() + module.leave.bias.sum())


def test_the_sum_of_a_shared_weights_gradients() -> None:
    layout = Layout(pipeline=2, data=2, micro_batch=2, zero=1)
    options = {"blocks": replace(BLOCKS, after=with_leave)}
    found = on_ranks(layout, counted, module_plan(layout), shared, options, model=tiny_model(tied=True))
    assert all(fact == claim for claim, fact in found)
    assert all(("tied", "tied gradients", "all_reduce") in claim for claim, _ in found)


def test_units_found_by_themselves_and_averaged_buffers() -> None:
    layout = Layout(data=2, micro_batch=4, zero=3)
    for claim, fact in on_ranks(layout, counted, module_plan(layout), normalized, {}):
        assert fact == claim
