"""Schedule: what each pipeline coordinate does, in which order; and what follows from that order alone.

A schedule is data. The planner walks it, the trainer executes it, `phalanx schedule show` draws it, `diagnose` reads
it; none of them knows a schedule by name. A new one is a function in `orders.py` and a line in SCHEDULES.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

from phalanx.plan import orders
from phalanx.plan.actions import BACKWARD_CHANNEL, FORWARD_CHANNEL, Action, ActionKind, Transfer

__all__ = [
    "BACKWARD_CHANNEL",
    "FORWARD_CHANNEL",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Family",
    "Flow",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Transfer",
    "forward_only",
    "placement",
    "schedule",
]

Placement: TypeAlias = tuple[tuple[int, int], ...]
Flow: TypeAlias = tuple[int, int, int]


class ScheduleError(AssertionError):
    """A schedule that must not run; the message says why. Ours to mend, never the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`actions[p]` is what pipeline coordinate p does, in order, in one optimizer step.

    `pipeline` coordinates hold `virtual_stages` model chunks each; `placement[stage]` says which coordinate holds a
    stage, as which of its chunks, and `stages[p][chunk]` the reverse.
    """

    name: str
    pipeline: int
    virtual_stages: int
    num_micro_batches: int
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    stages: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.pipeline)]
        for stage, (coordinate, chunk) in enumerate(self.placement):
            held[coordinate].append((chunk, stage))
        object.__setattr__(self, "stages", tuple(tuple(stage for _, stage in sorted(pairs)) for pairs in held))

    @property
    def num_stages(self) -> int:
        """Stages that a micro-batch passes through."""
        return self.pipeline * self.virtual_stages

    def stage(self, coordinate: int, chunk: int) -> int:
        """The stage that pipeline coordinate `coordinate` holds as its chunk `chunk`."""
        return self.stages[coordinate][chunk]

    def flows(self, stage: int, action: Action) -> tuple[Flow | None, Flow | None]:
        """What `action` on stage `stage` waits for, and what it hands on: (channel, receiving stage, micro-batch)."""
        micro_batch, last = action.micro_batch, len(self.placement) - 1
        if action.kind == "forward":
            return (
                (FORWARD_CHANNEL, stage, micro_batch) if stage > 0 else None,
                (FORWARD_CHANNEL, stage + 1, micro_batch) if stage < last else None,
            )
        if action.kind == "weight_gradient":
            return None, None
        return (
            (BACKWARD_CHANNEL, stage, micro_batch) if stage < last else None,
            (BACKWARD_CHANNEL, stage - 1, micro_batch) if stage > 0 else None,
        )

    def transfer(self, flow: Flow) -> Transfer:
        """Who hands `flow` to whom."""
        channel, stage, micro_batch = flow
        source = self.placement[stage - 1 if channel == FORWARD_CHANNEL else stage + 1][0]
        return Transfer(
            source=source,
            destination=self.placement[stage][0],
            channel=channel,
            micro_batch=micro_batch,
            stage=stage,
        )

    def needs(self, coordinate: int, action: Action) -> Transfer | None:
        """What `action` waits for from another stage; None at the ends of the pipeline and for weight gradients."""
        needed, _ = self.flows(self.stage(coordinate, action.chunk), action)
        return None if needed is None else self.transfer(needed)

    def gives(self, coordinate: int, action: Action) -> Transfer | None:
        """What `action` hands to another stage once done; equal to what `needs` says there."""
        _, given = self.flows(self.stage(coordinate, action.chunk), action)
        return None if given is None else self.transfer(given)

    def last_to_add(self, coordinate: int) -> Mapping[int, Action]:
        """Per chunk, the action after which the gradients of its weights are final and may be reduced."""
        return MappingProxyType({act.chunk: act for act in self.actions[coordinate] if act.adds_gradients})

    def live(self, coordinate: int) -> tuple[int, ...]:
        """After each action, how many (micro-batch, chunk) pairs still hold what their forward kept for gradients.

        A pair counts from its forward until its backward, or its weight gradient where backward is split.
        """
        counts, held = [], 0
        for action in self.actions[coordinate]:
            held += (action.kind == "forward") - action.adds_gradients
            counts.append(held)
        return tuple(counts)

    def peak_live(self, coordinate: int) -> int:
        """The most micro-batches, in units of one chunk's activations, that `coordinate` ever holds."""
        return max(self.live(coordinate), default=0)


def looped(pipeline: int, virtual_stages: int) -> Placement:
    """Chunk v of coordinate p is stage v × pipeline + p: a micro-batch goes round (SC21, section 2.2)."""
    return tuple((stage % pipeline, stage // pipeline) for stage in range(pipeline * virtual_stages))


def v_shaped(pipeline: int, virtual_stages: int) -> Placement:
    """Two chunks: a micro-batch goes forth over all coordinates and back again, so the first holds both ends."""
    return tuple((p, 0) for p in range(pipeline)) + tuple((p, 1) for p in reversed(range(pipeline)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one named schedule is made.

    `virtual_stages`: the fewest and the most it can have. `peak_live(pipeline, virtual_stages, num_micro_batches,
    coordinate)`: the stated bound on `Schedule.peak_live`, which the checker holds every schedule against.
    """

    summary: str
    order: Callable[[int, int, int], orders.Orders]
    peak_live: Callable[[int, int, int, int], int]
    placement: Callable[[int, int], Placement] = looped
    virtual_stages: tuple[int, int] = (1, 1)


MOST_VIRTUAL_STAGES = 64

SCHEDULES: Mapping[str, Family] = MappingProxyType(
    {
        "gpipe": Family(
            summary="all forwards, then all backwards",
            order=orders.breadth_first,
            peak_live=lambda p, v, m, i: m,
        ),
        "1f1b": Family(
            summary="one forward and one backward in turn: gpipe's bubble, memory bound by the pipeline's size",
            order=orders.one_forward_one_backward,
            peak_live=lambda p, v, m, i: min(m, p - i),
        ),
        "interleaved-1f1b": Family(
            summary="1f1b over several chunks: bubble smaller by their number, more messages and memory",
            order=orders.interleaved,
            peak_live=lambda p, v, m, i: min(m * v, 2 * (p - i - 1) + (v - 1) * orders.interleaved_rounds(p, m)[0] + 1),
            virtual_stages=(2, MOST_VIRTUAL_STAGES),
        ),
        "breadth-first": Family(
            summary="gpipe over several chunks: bubble smaller by their number, each chunk's weights used in one go",
            order=orders.breadth_first,
            peak_live=lambda p, v, m, i: m * v,
            virtual_stages=(2, MOST_VIRTUAL_STAGES),
        ),
        "zb-h1": Family(
            summary="1f1b with weight gradients put off: a third of its bubble, on every stage the first one's memory",
            order=orders.zero_bubble_h1,
            peak_live=lambda p, v, m, i: min(m, p),
        ),
        "zb-v": Family(
            summary="two chunks in a V, weight gradients put off: no bubble where all costs are equal, 1f1b's memory",
            order=orders.zero_bubble_v,
            peak_live=lambda p, v, m, i: min(m * v, 2 * p),
            placement=v_shaped,
            virtual_stages=(2, 2),
        ),
        "dualpipe-v": Family(
            summary="two chunks in a V, forward beside backward, so that each hides the other's communication",
            order=orders.dualpipe_v,
            peak_live=lambda p, v, m, i: min(m * v, 2 * p + 1),
            placement=v_shaped,
            virtual_stages=(2, 2),
        ),
    }
)


def placement(name: str, pipeline: int, virtual_stages: int) -> Placement:
    """Where the named schedule puts each stage: (pipeline coordinate, chunk) by stage."""
    return SCHEDULES[name].placement(pipeline, virtual_stages)


@functools.lru_cache(maxsize=8)
def schedule(name: str, pipeline: int, virtual_stages: int, num_micro_batches: int) -> Schedule:
    """The named schedule. Sizes must be legal: `legality.problems` is where users hear about it."""
    family = SCHEDULES[name]
    assert min(pipeline, num_micro_batches) >= 1, f"{pipeline=} {num_micro_batches=}"
    fewest, most = family.virtual_stages
    assert fewest <= virtual_stages <= most, f"{name} with {virtual_stages} virtual stages"
    return Schedule(
        name=name,
        pipeline=pipeline,
        virtual_stages=virtual_stages,
        num_micro_batches=num_micro_batches,
        placement=family.placement(pipeline, virtual_stages),
        actions=family.order(pipeline, virtual_stages, num_micro_batches),
    )


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` alone, in its order, for validation. It can run where `schedule` can: a forward waits
    for forwards only."""
    actions = (tuple(action for action in row if action.kind == "forward") for row in schedule.actions)
    return replace(schedule, actions=tuple(actions))
