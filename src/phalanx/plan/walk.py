"""Walk a Schedule with given costs: when each action starts and ends, and how long a step's pipeline takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.plan.schedule import Action, Schedule, Transfer

# Equal stages, backward twice as dear as forward: what closed forms of the bubble assume.
EQUAL_COSTS = {"forward": 1.0, "backward": 2.0, "input_gradient": 1.0, "weight_gradient": 1.0}


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
        """The share of all coordinates' time in which they wait."""
        busy = sum(self.busy_s(coordinate) for coordinate in range(len(self.starts_s)))
        return 1.0 - busy / (len(self.starts_s) * self.step_s)


def equal_costs(stage: int, action: Action) -> float:
    """EQUAL_COSTS as an argument of `walk`."""
    return EQUAL_COSTS[action.kind]


def walk(
    schedule: Schedule,
    action_s: Callable[[int, Action], float] = equal_costs,
    transfer_s: Callable[[Transfer], float] = lambda transfer: 0.0,
) -> Walk:
    """Start every action as soon as its coordinate is free and what it needs has arrived.

    `action_s(stage, action)` and `transfer_s(transfer)` are seconds; transfers cost their receiver only the wait.
    The schedule must pass `schedule_check.check`; one that cannot run fails an assertion.
    """
    starts: list[list[float]] = [[] for _ in schedule.actions]
    ends: list[list[float]] = [[] for _ in schedule.actions]
    arrivals: dict[Transfer, float] = {}
    waiting: dict[Transfer, int] = {}
    runnable = list(range(schedule.pipeline))
    while runnable:
        coordinate = runnable.pop()
        actions = schedule.actions[coordinate]
        while len(ends[coordinate]) < len(actions):
            action = actions[len(ends[coordinate])]
            needed = schedule.needs(coordinate, action)
            if needed is not None and needed not in arrivals:
                waiting[needed] = coordinate
                break
            free = ends[coordinate][-1] if ends[coordinate] else 0.0
            start = free if needed is None else max(free, arrivals[needed])
            end = start + action_s(schedule.stage(coordinate, action.chunk), action)
            starts[coordinate].append(start)
            ends[coordinate].append(end)
            given = schedule.gives(coordinate, action)
            if given is not None:
                arrivals[given] = end if given.local else end + transfer_s(given)
                if given in waiting:
                    runnable.append(waiting.pop(given))
    assert not waiting, f"{schedule.name} cannot run: {next(iter(waiting))} never comes"
    return Walk(starts_s=tuple(map(tuple, starts)), ends_s=tuple(map(tuple, ends)))
