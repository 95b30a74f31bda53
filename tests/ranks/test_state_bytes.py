"""The bytes of parameters, gradients and optimizer state that are alive on each rank are those that Shards imply."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers import run_worlds
from single import masked_batch
from tiny import tiny_model, tiny_plan
from torch import Tensor

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.stage_traffic import COMPUTE_BYTES
from phalanx.plan.states import StateBytes, state_bytes
from phalanx.trainer.engine import Engine
from phalanx.trainer.world import World

Storages = dict[int, int]
"""Bytes by address."""


def storages(tensors: Iterable[Tensor]) -> Storages:
    every = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in every if storage.nbytes()}


def alive() -> Storages:
    """All that tensors of this process hold, but for the slots through which ranks talk: bytes of shared memory.

    What other tests traced or compiled may have left tensors without data behind: their storage lies on "meta".
    """
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    tensors = [each for each in tensors if each.untyped_storage().device.type != "meta"]
    slots = storages(tensor for tensor in tensors if tensor.dtype == torch.uint8)
    return {address: size for address, size in storages(tensors).items() if address not in slots}


def measure(world: World, plan: Plan) -> tuple[StateBytes, int, int]:
    """What is alive between two steps: states, and all else; and of the latter, what tables of positions take."""
    before = alive()
    engine = Engine(plan, world.coord, world.comm, world.device)
    for step in range(2):
        tokens, labels, num_supervised = masked_batch(plan, step)
        mine = list(engine.positions)
        engine.forward_backward(engine.micro_batches(tokens[mine], labels[mine], num_supervised, step))
        engine.synchronize()
        engine.update(1e-2, 1.0)
    del tokens, labels
    slices, lossy = engine.data.slices, engine.data.lossy
    errors = [tensor for _, tensor in lossy.kept()] if lossy else []
    parameters = storages([*(buffer.parameters for buffer in engine.buffers), *(part.parameters for part in slices)])
    gradients = storages(
        [*(buffer.gradients for buffer in engine.buffers), *(part.gradients for part in slices), *errors]
    )
    optimizer = storages(tensor for state in engine.optimizer.state() for tensor in state.values())
    kept = {**parameters, **gradients, **optimizer}
    others = sum(size for address, size in alive().items() if address not in kept and address not in before)
    optimizer = {address: size for address, size in optimizer.items() if address not in parameters}
    sums = StateBytes(
        parameters=sum(parameters.values()), gradients=sum(gradients.values()), optimizer=sum(optimizer.values())
    )
    tables = [rotation(stage) for stage in engine.pipeline.stages]
    return sums, others, sum(storages(table for pair in tables for table in pair).values())


def rotation(stage: Any) -> tuple[Tensor, ...]:
    layers = [block for block in stage.blocks if hasattr(block, "attention")]
    return layers[0].attention.rotation if layers else ()


LAYOUTS = [
    Layout(data=2, tensor=2, zero=0),
    Layout(data=2, pipeline=2, zero=1),
    Layout(data=4, zero=1, zero_group=2),
    Layout(data=4, zero=2),
    Layout(data=4, zero=2, zero_group=2),
    Layout(data=4, zero=3),
    Layout(data=4, pipeline=2, zero=3, zero_group=2),
    Layout(data=2, reduce="powersgd", reduce_rank=2),
    Layout(data=2, zero=1, reduce="top-k"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_alive_is_what_shards_say(layout: Layout) -> None:
    """Besides them: the tables of positions, and the shape of what stages exchange."""
    precision = "fp32" if layout.pipeline > 1 else "bf16"
    plan = tiny_plan(layout, tiny_model(tied=True), precision=precision)
    for rank, (states, others, tables) in enumerate(run_worlds(layout, measure, plan, model=plan.model)):
        assert states == state_bytes(plan, layout.coord(rank)), f"rank {rank}"
        shape = layout.micro_batch * plan.job.seq_len * plan.model.hidden * COMPUTE_BYTES[precision]
        assert others <= tables + shape + 1024, f"rank {rank}: {others} bytes of something else"
