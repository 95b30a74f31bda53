"""Traffic is true: what `plan.traffic` claims equals what the Comms count, for every layout of the matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import run_worlds
from matrix import UNUSUAL, layouts, models
from tiny import tiny_model, tiny_plan

from phalanx.data.source import Batch
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.traffic import traffic
from phalanx.trainer import loop
from phalanx.trainer.engine import Engine
from phalanx.trainer.stop import StopRequest
from phalanx.trainer.world import World

CASES = [(f"{name} {layout}", models()[name], layout) for name, layout in layouts()]
CASES += [(name, *case) for name, case in UNUSUAL.items()]
CASES.append(("long micro-batches", tiny_model(), Layout(tensor=2, pipeline=2, micro_batch=8)))


class Zeros:
    """A source of batches of zeros."""

    def __init__(self, plan: Plan) -> None:
        self.job = plan.job

    def batch(self, step: int, positions: list[int]) -> Batch:
        zeros = np.zeros((len(positions), self.job.seq_len), dtype=np.int64)
        return Batch(tokens=zeros, labels=zeros, num_supervised=self.job.tokens_per_step)


def count(world: World, plan: Plan) -> dict[tuple[str, str, str], list[int]]:
    engine = Engine(plan, world.coord, world.comm, world.device)
    world.recorder.reset()
    loop.step(engine, Zeros(plan), loop.Clock(world.recorder), StopRequest(), 0)
    return dict(world.recorder.messages)


@pytest.mark.parametrize(("name", "model", "layout"), CASES, ids=[case[0] for case in CASES])
def test_every_message_is_claimed_and_counted(name: str, model: Any, layout: Layout) -> None:
    seq_len = 192 if name == "long micro-batches" else 32
    plan = tiny_plan(layout, model, precision="fp32", seq_len=seq_len)
    counted = run_worlds(layout, count, plan, model=model)
    for rank, messages in enumerate(counted):
        claimed: dict[tuple[str, str, str], list[int]] = {}
        for message in traffic(plan, layout.coord(rank)):
            entry = claimed.setdefault((message.group, message.purpose, message.operation), [0, 0])
            entry[0] += message.count
            entry[1] += message.payload_bytes
        assert messages == claimed, f"rank {rank}"
