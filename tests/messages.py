"""What a training step is claimed to send, and what it is seen to send."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from phalanx.data.source import Batch
from phalanx.plan.layout import Coord
from phalanx.plan.plan import Plan
from phalanx.plan.stage_traffic import Message
from phalanx.plan.traffic import traffic
from phalanx.trainer import loop
from phalanx.trainer.engine import Engine
from phalanx.trainer.guards import Guards
from phalanx.trainer.stop import StopRequest
from phalanx.trainer.world import World

Messages = dict[tuple[str, str, str], list[int]]
"""[count, payload bytes] by (group, purpose, operation)."""


class Zeros:
    """A source of batches of zeros; where documents stand alone, each token is one."""

    def __init__(self, plan: Plan) -> None:
        self.job = plan.job

    def batch(self, step: int, positions: list[int]) -> Batch:
        zeros = np.zeros((len(positions), self.job.seq_len), dtype=np.int64)
        positions = zeros if self.job.data.documents == "separate" else None
        return Batch(tokens=zeros, labels=zeros, num_supervised=self.job.tokens_per_step, positions=positions)


def counted(engine: Engine, world: World) -> Messages:
    """What the Comms of this rank count in one training step."""
    world.recorder.reset()
    loop.step(engine, Zeros(engine.plan), loop.Clock(world.recorder), StopRequest(), Guards(engine), 0)
    return dict(world.recorder.messages)


def claimed(plan: Plan, coord: Coord) -> Messages:
    """What `plan.traffic` says."""
    return added(traffic(plan, coord))


def added(claims: Iterable[Message]) -> Messages:
    """Claims for one purpose, as of several chunks of a model, put together."""
    messages: Messages = {}
    for message in claims:
        entry = messages.setdefault((message.group, message.purpose, message.operation), [0, 0])
        entry[0] += message.count
        entry[1] += message.payload_bytes
    return messages
