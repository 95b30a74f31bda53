"""Both walks agree: the one that keeps every start and end, and the numbered one that only says how long it takes."""

from __future__ import annotations

import random

import pytest

from phalanx.plan.schedule import SCHEDULES, schedule
from phalanx.plan.walk import KINDS, step_s, steps, walk

SHAPES = [
    (name, pipeline, chunks, num_micro_batches)
    for name, family in SCHEDULES.items()
    for pipeline, num_micro_batches in ((1, 1), (2, 3), (3, 7), (4, 8), (5, 4))
    for chunks in sorted({family.virtual_stages[0], min(3, family.virtual_stages[1])})
]


@pytest.mark.parametrize("hop_s", [0.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbered_walk_takes_as_long(shape: tuple[str, int, int, int], hop_s: float) -> None:
    made, draw = schedule(*shape), random.Random(str(shape))
    seconds = [[draw.uniform(0.1, 3.0) for _ in range(made.num_stages)] for _ in KINDS]
    whole = walk(made, lambda stage, action: seconds[KINDS.index(action.kind)][stage], lambda transfer: hop_s)
    assert step_s(steps(made), seconds, hop_s) == pytest.approx(whole.step_s, rel=1e-12)
