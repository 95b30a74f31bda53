"""Messages of the data axis under compute: the same bits as without, whole parameters for whoever reads them, and a
block without parameters that says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import run_worlds
from messages import claimed, counted
from simulated import engines
from single import masked_batch
from tiny import tiny_model, tiny_plan

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.trainer.engine import Engine
from phalanx.trainer.world import World

LAYOUTS = [
    Layout(data=2, pipeline=2, bucket_bytes=2**17),
    Layout(data=4, zero=1, zero_group=2, bucket_bytes=2**17),
    Layout(data=2, zero=1, reduce="powersgd", bucket_bytes=2**17),
    Layout(data=2, pipeline=2, zero=2),
    # One block in a row, whose gradients are wanted again while a scale for their way is still agreed on.
    Layout(data=2, pipeline=2, zero=2, reduce="fp16", stage_layers=(4, 0)),
    Layout(data=2, tensor=2, zero=3, reduce="bf16"),
]


def train(world: World, plans: list[Plan]) -> list[Any]:
    """Losses, norms and what this rank holds after two steps under each plan, with the messages of a third one."""
    results = []
    for plan in plans:
        engine = Engine(plan, world.coord, world.comm, world.device)
        numbers = []
        for step in range(2):
            tokens, labels, num_supervised = masked_batch(plan, step)
            mine = list(engine.positions)
            loss = engine.forward_backward(engine.micro_batches(tokens[mine], labels[mine], num_supervised, step))
            engine.synchronize()
            numbers += engine.totals(loss)[:2]
            engine.update(1e-2, 1.0)
        engine.data.wait_for_parameters()
        held = torch.cat([part.parameters for part in engine.data.slices])
        if engine.data.zero < 3:
            held = torch.cat([buffer.parameters for buffer in engine.buffers])
        messages = {key: list(count) for key, count in counted(engine, world).items()}
        engine.data.wait_for_parameters()
        results.append((numbers, held, messages))
    return results


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_with_and_without_are_the_same_to_the_last_bit(layout: Layout, shared_memory: bool) -> None:
    plans = [tiny_plan(replace(layout, overlap=overlap), precision="fp32") for overlap in (True, False)]
    results = run_worlds(layout, train, plans, model=plans[0].model, shared_memory=shared_memory)
    for rank, ((numbers, held, messages), (numbers_without, held_without, without)) in enumerate(results):
        assert numbers == numbers_without
        assert torch.equal(held, held_without)
        assert messages == claimed(plans[0], layout.coord(rank))
        assert without == claimed(plans[1], layout.coord(rank))


def under_way(world: World, plan: Plan) -> list[int]:
    """Before each block of a forward, how many blocks' parameters have not come yet."""
    engine, waiting = Engine(plan, world.coord, world.comm, world.device), []
    before_forward = engine.data.before_forward

    def watched(block: Any, following: Any) -> None:
        before_forward(block, following)
        assert not any(buffer in engine.data._gathers for buffer in block.reads)
        waiting.append(len(engine.data._gathers))

    engine.data.before_forward = watched  # type: ignore[method-assign]
    engine.publish()
    tokens, labels, num_supervised = masked_batch(plan, 0)
    engine.run_alone(engine.micro_batches(tokens[:1], labels[:1], num_supervised, 0)[0])
    return waiting


@pytest.mark.parametrize(("zero", "expected"), [(1, [5, 4, 3, 2, 1, 0]), (3, [1, 1, 1, 1, 1, 0])])
def test_parameters_are_waited_for_block_by_block(zero: int, expected: list[int]) -> None:
    """Under ZeRO 1 those of all later blocks are on their way, under ZeRO 3 those of the next one."""
    plan = tiny_plan(Layout(data=2, zero=zero, micro_batch=4))
    assert run_worlds(plan.layout, under_way, plan, model=plan.model) == [expected] * 2


@pytest.mark.parametrize(("index", "name"), [(0, "embedding"), (2, "layers.1"), (5, "head")])
def test_a_freed_block_that_is_run_says_so(index: int, name: str) -> None:
    plan = tiny_plan(Layout(data=2, zero=3), tiny_model(tied=True))
    engine = engines(plan)[0]
    tokens, labels, num_supervised = masked_batch(plan, 0)
    batch = engine.micro_batches(tokens[:4], labels[:4], num_supervised, 0)[0]
    inputs = None if index == 0 else torch.zeros(32, 64, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=f"{name} runs while its parameters are freed"):
        engine.pipeline.stages[0].blocks[index](inputs, batch)
