"""Traffic is true: what `plan.traffic` claims equals what the Comms count. `test_layouts` shows it for every layout of
the matrix, in float64; here other element sizes and several chunks of the loss."""

from __future__ import annotations

import pytest
from helpers import run_worlds
from messages import Messages, claimed, counted
from tiny import tiny_model, tiny_plan

from phalanx.plan.layout import Coord, Layout
from phalanx.plan.plan import Plan
from phalanx.plan.shards import rank_buffers
from phalanx.plan.traffic import HEAD_ROWS
from phalanx.trainer.engine import Engine
from phalanx.trainer.world import World

ALL_AXES = Layout(tensor=2, pipeline=2, data=2, zero=1, sequence_parallel=True)
LAYER_BYTES = 4 * rank_buffers(tiny_model(max_seq_len=32), Layout(data=2), Coord(), 32)[1].num_elements


def count(world: World, plan: Plan) -> Messages:
    return counted(Engine(plan, world.coord, world.comm, world.device), world)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "seq_len"),
    [
        (ALL_AXES, 32),
        (Layout(tensor=2, pipeline=2, micro_batch=8), 192),
        (Layout(tensor=2, micro_batch=8), HEAD_ROWS // 8),
        (Layout(data=2, tensor=2, zero=3), 32),
        (Layout(data=2, bucket_bytes=LAYER_BYTES), 32),
        (Layout(data=2, pipeline=2, zero=1, outermost="data"), 32),
    ],
    ids=[
        "all axes",
        "long micro-batches",
        "one whole chunk of the loss",
        "zero 3",
        "buckets as large as a layer",
        "data outermost",
    ],
)
def test_every_message_is_claimed_and_counted(layout: Layout, seq_len: int, precision: str) -> None:
    plan = tiny_plan(layout, tiny_model(max_seq_len=seq_len), precision=precision, seq_len=seq_len)
    for rank, messages in enumerate(run_worlds(layout, count, plan, model=plan.model)):
        assert messages == claimed(plan, layout.coord(rank)), f"rank {rank}"
