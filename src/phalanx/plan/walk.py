"""Walk a Schedule with given costs: when each action starts and ends, how long a step takes, when messages come."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from phalanx.plan.schedule import Action, ActionKind, Flow, Schedule, ScheduleError, Transfer

ReceivePoints: TypeAlias = tuple[tuple[tuple[Transfer, ...], ...], ...]

EQUAL_COSTS = {"forward": 1.0, "backward": 2.0, "input_gradient": 1.0, "weight_gradient": 1.0}
"""Seconds by kind of action under which closed forms of the bubble are stated: all stages alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """`starts_s[p][i]` and `ends_s[p][i]`: when pipeline coordinate p runs its i-th action."""

    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @property
    def step_s(self) -> float:
        """From the first start to the last end."""
        return max(ends[-1] for ends in self.ends_s)

    def busy_s(self, coordinate: int) -> float:
        """Seconds that `coordinate` computes."""
        return sum(end - start for start, end in zip(self.starts_s[coordinate], self.ends_s[coordinate], strict=True))

    @property
    def bubble(self) -> float:
        """The share of time in which a coordinate waits, as published: between its own first start and last end, the
        longest of these spans held against the mean of the work (arXiv 2401.10241, section 5)."""
        num_coordinates = len(self.starts_s)
        busy = sum(self.busy_s(coordinate) for coordinate in range(num_coordinates)) / num_coordinates
        return 1.0 - busy / max(ends[-1] - starts[0] for starts, ends in zip(self.starts_s, self.ends_s, strict=True))


def equal_costs(stage: int, action: Action) -> float:
    """EQUAL_COSTS as an argument of `walk`."""
    return EQUAL_COSTS[action.kind]


def walk(
    schedule: Schedule,
    action_s: Callable[[int, Action], float] = equal_costs,
    transfer_s: Callable[[Transfer], float] | None = None,
) -> Walk:
    """Start every action as soon as its coordinate is free and what it needs has arrived.

    `action_s(stage, action)` and `transfer_s(transfer)` are seconds; a transfer costs its receiver only the wait, and
    nothing where none is given. Raises ScheduleError for actions that wait for each other.
    """
    starts: list[list[float]] = [[] for _ in schedule.actions]
    ends: list[list[float]] = [[] for _ in schedule.actions]
    arrivals: dict[Flow, float] = {}
    waiting: dict[Flow, int] = {}
    runnable = list(range(schedule.pipeline))
    while runnable:
        coordinate = runnable.pop()
        free_s = ends[coordinate][-1] if ends[coordinate] else 0.0
        for action in schedule.actions[coordinate][len(ends[coordinate]) :]:
            stage = schedule.stages[coordinate][action.chunk]
            needed, given = schedule.flows(stage, action)
            if needed is not None:
                arrival_s = arrivals.get(needed)
                if arrival_s is None:
                    waiting[needed] = coordinate
                    break
                free_s = max(free_s, arrival_s)
            starts[coordinate].append(free_s)
            free_s += action_s(stage, action)
            ends[coordinate].append(free_s)
            if given is not None:
                arrivals[given] = free_s + _travel_s(schedule.transfer(given), transfer_s) if transfer_s else free_s
                if given in waiting:
                    runnable.append(waiting.pop(given))
    if waiting:
        never = "; ".join(f"{schedule.transfer(flow)} never comes" for flow in waiting)
        raise ScheduleError(f"{schedule.name} waits for itself: {never}")
    return Walk(starts_s=tuple(map(tuple, starts)), ends_s=tuple(map(tuple, ends)))


def _travel_s(transfer: Transfer, transfer_s: Callable[[Transfer], float]) -> float:
    return 0.0 if transfer.local else transfer_s(transfer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A schedule as whole numbers, for walking it many times: per coordinate and action (stage, kind, the flow that it
    waits for, the flow that it hands on, whether that is sent); kinds index KINDS, -1 is no flow."""

    name: str
    num_flows: int
    rows: tuple[tuple[tuple[int, int, int, int, bool], ...], ...]


KINDS: tuple[ActionKind, ...] = ("forward", "backward", "input_gradient", "weight_gradient")


def steps(schedule: Schedule) -> Steps:
    """`schedule`, numbered."""
    num_stages, num_micro_batches = len(schedule.placement), schedule.num_micro_batches
    home = [coordinate for coordinate, _ in schedule.placement]
    codes = {kind: number for number, kind in enumerate(KINDS)}
    rows = []
    for coordinate, actions in enumerate(schedule.actions):
        row = []
        for action in actions:
            stage, code = schedule.stages[coordinate][action.chunk], codes[action.kind]
            needed, given, sent = -1, -1, False
            if code != 3:
                step = 1 if code == 0 else -1
                base = action.micro_batch + (0 if code == 0 else num_stages * num_micro_batches)
                needed = base + stage * num_micro_batches if 0 <= stage - step < num_stages else -1
                if 0 <= stage + step < num_stages:
                    given = base + (stage + step) * num_micro_batches
                    sent = home[stage] != home[stage + step]
            row.append((stage, code, needed, given, sent))
        rows.append(tuple(row))
    return Steps(name=schedule.name, num_flows=2 * num_stages * num_micro_batches, rows=tuple(rows))


def step_s(numbered: Steps, seconds: Sequence[Sequence[float]], hop_s: float) -> float:
    """As `walk(…).step_s` where all transfers cost `hop_s`; `seconds[kind][stage]` of each action, kinds as KINDS."""
    rows = numbered.rows
    arrivals: list[float] = [-1.0] * numbered.num_flows
    waiting: dict[int, int] = {}
    place, free = [0] * len(rows), [0.0] * len(rows)
    runnable = list(range(len(rows)))
    while runnable:
        coordinate = runnable.pop()
        row, now = rows[coordinate], free[coordinate]
        for at in range(place[coordinate], len(row)):
            stage, kind, needed, given, sent = row[at]
            if needed >= 0:
                arrival_s = arrivals[needed]
                if arrival_s < 0.0:
                    waiting[needed] = coordinate
                    break
                if arrival_s > now:
                    now = arrival_s
            now += seconds[kind][stage]
            if given >= 0:
                arrivals[given] = now + hop_s if sent else now
                if given in waiting:
                    runnable.append(waiting.pop(given))
        else:
            at = len(row)
        place[coordinate], free[coordinate] = at, now
    assert not waiting, f"{numbered.name} waits for itself"
    return max(free)


def receive_points(schedule: Schedule) -> ReceivePoints:
    """`[p][i]`: what coordinate p receives before its i-th action, so that messages are taken in as they come.

    Where a coordinate works on other chunks while messages for a later one arrive, receiving only when they are needed
    would hold up the sender, who may be the one that is waited for. Here each message is received before the first
    action that starts after it was sent (under EQUAL_COSTS). Order is thus that of sending on every channel, and no
    two coordinates can wait for each other: whatever a receive waits for was sent earlier, or starts earlier, than the
    action behind it.
    """
    times = walk(schedule)
    sent: list[list[tuple[float, Transfer]]] = [[] for _ in schedule.actions]
    for coordinate, actions in enumerate(schedule.actions):
        for action, end_s in zip(actions, times.ends_s[coordinate], strict=True):
            given = schedule.gives(coordinate, action)
            if given is not None and not given.local:
                sent[given.destination].append((end_s, given))
    points = []
    for starts_s, messages in zip(times.starts_s, sent, strict=True):
        before: list[list[Transfer]] = [[] for _ in starts_s]
        for sent_s, transfer in sorted(messages, key=lambda message: message[0]):
            before[bisect_left(starts_s, sent_s)].append(transfer)
        points.append(tuple(map(tuple, before)))
    return tuple(points)


def just_in_time(schedule: Schedule) -> ReceivePoints:
    """`[p][i]` as in `receive_points`, each message received before the action that needs it."""
    return tuple(
        tuple(
            (needed,) if needed is not None and not needed.local else ()
            for needed in (schedule.needs(coordinate, action) for action in actions)
        )
        for coordinate, actions in enumerate(schedule.actions)
    )
