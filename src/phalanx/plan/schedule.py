"""Schedule: what each pipeline coordinate does, in which order; and what follows from that order alone.

A schedule is data. The planner walks it, the trainer executes it, `phalanx schedule show` draws it, `diagnose` reads
it; none of them knows a schedule by name. A new one is a function in `orders.py` and a line in SCHEDULES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    "Placement",
    "Schedule",
    "Transfer",
    "placement",
    "schedule",
]

Placement: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`actions[p]` is what pipeline coordinate p does, in order, in one optimizer step.

    `pipeline` coordinates hold `virtual_stages` model chunks each; `placement[stage]` says which coordinate holds a
    stage, as which of its chunks.
    """

    name: str
    pipeline: int
    virtual_stages: int
    num_micro_batches: int
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages that a micro-batch passes through."""
        return self.pipeline * self.virtual_stages

    def stage(self, coordinate: int, chunk: int) -> int:
        """The stage that pipeline coordinate `coordinate` holds as its chunk `chunk`."""
        return self.placement.index((coordinate, chunk))

    def needs(self, coordinate: int, action: Action) -> Transfer | None:
        """What `action` waits for from another stage; None at the ends of the pipeline and for weight gradients."""
        stage = self.stage(coordinate, action.chunk)
        if action.kind == "forward":
            return self._transfer(stage - 1, stage, action.micro_batch)
        if action.kind == "weight_gradient":
            return None
        return self._transfer(stage + 1, stage, action.micro_batch)

    def gives(self, coordinate: int, action: Action) -> Transfer | None:
        """What `action` hands to another stage once done; equal to what `needs` says there."""
        stage = self.stage(coordinate, action.chunk)
        if action.kind == "forward":
            return self._transfer(stage, stage + 1, action.micro_batch)
        if action.kind == "weight_gradient":
            return None
        return self._transfer(stage, stage - 1, action.micro_batch)

    def _transfer(self, from_stage: int, to_stage: int, micro_batch: int) -> Transfer | None:
        if not (0 <= from_stage < self.num_stages and 0 <= to_stage < self.num_stages):
            return None
        return Transfer(
            source=self.placement[from_stage][0],
            destination=self.placement[to_stage][0],
            channel=FORWARD_CHANNEL if from_stage < to_stage else BACKWARD_CHANNEL,
            micro_batch=micro_batch,
            stage=to_stage,
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one named schedule is made.

    `virtual_stages`: the fewest and the most it can have; `peak_live(pipeline, virtual_stages, num_micro_batches,
    coordinate)`: the stated bound on `Schedule.peak_live`, which the checker holds every schedule against.
    """

    summary: str
    order: Callable[[int, int, int], orders.Orders]
    peak_live: Callable[[int, int, int, int], int]
    placement: Callable[[int, int], Placement] = looped
    virtual_stages: tuple[int, int] = (1, 1)


SCHEDULES: Mapping[str, Family] = MappingProxyType(
    {
        "gpipe": Family(
            summary="all forwards, then all backwards",
            order=orders.gpipe,
            peak_live=lambda pipeline, virtual_stages, num_micro_batches, coordinate: num_micro_batches,
        ),
        "1f1b": Family(
            summary="one forward and one backward in turn: the bubble of gpipe, less memory",
            order=orders.one_forward_one_backward,
            peak_live=lambda pipeline, virtual_stages, num_micro_batches, coordinate: min(
                num_micro_batches, pipeline - coordinate
            ),
        ),
    }
)


def placement(name: str, pipeline: int, virtual_stages: int) -> Placement:
    """Where the named schedule puts each stage: (pipeline coordinate, chunk) by stage."""
    return SCHEDULES[name].placement(pipeline, virtual_stages)


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
