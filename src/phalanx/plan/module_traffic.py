"""Module traffic: what one rank sends while it trains a module of the user's own; the twin of `plan.traffic`.

A module says little of itself before it runs, so the claim is made from a ModuleShape: which flat buffers its stages
have, how large the message between stages is, and how many values its replicas average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.layout import Coord
from phalanx.plan.module import ModulePlan
from phalanx.plan.schedule import schedule
from phalanx.plan.shards import Buffer
from phalanx.plan.stage_traffic import ACCUMULATION_BYTES, Message, StageTraffic

NUM_MODULE_STATISTICS = 10
"""Float64 numbers in the control message of a step: loss, number of items, squared norm, unused parameters, votes to
stop, and five sums of seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShape:
    """What a rank's traffic follows from. `buffers`: of each of its stages; `message_bytes`: what passes between stages
    per micro-batch; `num_averaged`: values of floating buffers that replicas average."""

    buffers: Sequence[Sequence[Buffer]]
    message_bytes: int
    num_averaged: int


def module_traffic(plan: ModulePlan, coord: Coord, shape: ModuleShape) -> tuple[Message, ...]:
    """All messages of one training step of the rank at `coord`; groups of one rank send none."""
    return tuple(message for message in _messages(plan, coord, shape) if message.count)


def _messages(plan: ModulePlan, coord: Coord, shape: ModuleShape) -> Iterator[Message]:
    layout, num_micro_batches = plan.layout, plan.layout.num_micro_batches(plan.job.global_batch)
    order = schedule(layout.schedule, layout.pipeline, layout.virtual_stages, num_micro_batches)
    common = StageTraffic(
        layout=layout, coord=coord, precision=plan.job.precision, schedule=order, buffers=shape.buffers
    )
    yield from common.pipeline(shape.message_bytes)
    if layout.data > 1:
        yield from common.data()
        if layout.zero == 3 and layout.num_shards > 1:
            yield _gathers(common)
        if shape.num_averaged:
            size = 8 * shape.num_averaged
            yield Message(group="data", purpose="buffers", operation="all_reduce", count=1, payload_bytes=size)
    tied = [part for chunk in shape.buffers for buffer in chunk for part in buffer.parts if part.copies == "tied"]
    if tied:
        elements = sum(part.stop - part.start for part in tied) // layout.num_shards
        size = elements * ACCUMULATION_BYTES[plan.job.precision]
        yield Message(group="tied", purpose="tied gradients", operation="all_reduce", count=1, payload_bytes=size)
    if layout.num_ranks > 1:
        size = 8 * NUM_MODULE_STATISTICS
        yield Message(group="world", purpose="loss and norm", operation="all_reduce", count=1, payload_bytes=size)


def _gathers(common: StageTraffic) -> Message:
    """ZeRO 3 makes each unit whole for its forward, and again for its backward, which may run it once more."""
    actions = common.schedule.actions[common.coord.pipeline]
    needed = [buffer for action in actions for buffer in common.buffers[action.chunk]]
    return common.parameters(len(needed), sum(buffer.num_elements for buffer in needed))
