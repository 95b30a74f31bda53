"""The forwards of every schedule by themselves: all of them, in an order that can run."""

from __future__ import annotations

import pytest

from phalanx.plan.schedule import SCHEDULES, forward_only, schedule
from phalanx.plan.walk import receive_points, walk


@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_forward_runs_and_every_message_is_received(name: str, pipeline: int, num_micro_batches: int):
    virtual_stages = SCHEDULES[name].virtual_stages[0]
    whole = schedule(name, pipeline, virtual_stages, num_micro_batches)
    only = forward_only(whole)
    walk(only)  # raises where actions wait for each other
    for coordinate, actions in enumerate(only.actions):
        assert {action.kind for action in actions} == {"forward"}
        assert len(set(actions)) == virtual_stages * num_micro_batches
        assert not only.last_to_add(coordinate)
        needed = [only.needs(coordinate, action) for action in actions]
        received = [transfer for point in receive_points(only)[coordinate] for transfer in point]
        assert sorted(received, key=str) == sorted((need for need in needed if need and not need.local), key=str)
