"""Timeline: from seconds per block to seconds per step.

Two ways to the same pipeline time. `bound` is arithmetic over arrays: what no order of work can beat. `replay` walks
the layout's own Schedule. The search ranks by the bound and replays until no unplayed layout can still win.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.plan.legality import SPLIT_BACKWARD
from phalanx.plan.schedule import Action, Transfer, placement, schedule
from phalanx.plan.walk import KINDS, Steps, Walk, step_s, steps, walk
from phalanx.planner.candidates import Array
from phalanx.planner.costs import Costs
from phalanx.planner.data_axis import Gathers
from phalanx.planner.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on each stage, [layouts, stages]: forward, backward, and of backward the weight
    gradient; of a transfer to the next stage, [layouts]."""

    forward_s: Array
    backward_s: Array
    weight_s: Array
    transfer_s: Array

    def take(self, index: Array) -> StageTimes:
        """The layouts at `index`."""
        return StageTimes(
            forward_s=self.forward_s.take(index, axis=0),
            backward_s=self.backward_s.take(index, axis=0),
            weight_s=self.weight_s.take(index, axis=0),
            transfer_s=self.transfer_s[index],
        )


def stage_times(
    costs: Costs, layers: Array, repeated: Array, gathers: Gathers, transfer_s: Array, engine: Engine, waited: float
) -> StageTimes:
    """`layers`: how many layers each stage holds, [stages], of which it recomputes `repeated`, [layouts, stages]; the
    embedding is on the first, the head on the last.

    A layer whose parameters are gathered one ahead takes at least as long as the messages beside it. Sender and
    receiver lose the `waited` share of a transfer's time.
    """

    def stage(layer: Array, embedding: Any, head: Any) -> Array:
        parts: Array = layer[:, None] * layers
        parts[:, 0] += costs.at(embedding)
        parts[:, -1] += costs.at(head)
        return parts

    forward_s = costs.at(costs.layer_forward.total_s)
    layer_forward = np.maximum(forward_s + gathers.tax * gathers.forward_s, gathers.forward_s)
    again, plain = (
        np.maximum(costs.at(backward.total_s) + gathers.tax * gathers.backward_s, gathers.backward_s)
        for backward in (costs.layer_backward, costs.layer_backward_plain)
    )
    forward = stage(layer_forward, costs.embedding_forward.total_s, costs.head_forward.total_s)
    backward = stage(plain, costs.embedding_backward.total_s, costs.head_backward.total_s)
    backward += (again - plain)[:, None] * repeated
    weight = stage(costs.at(costs.layer_weight_s), costs.embedding_backward.total_s, 0.0)
    forward += engine.host_micro_batch_s
    forward[:, :-1] += waited * transfer_s[:, None]  # the last stage sends no further
    backward[:, 1:] += waited * transfer_s[:, None]
    return StageTimes(
        forward_s=forward,
        backward_s=backward,
        weight_s=weight,
        transfer_s=transfer_s * (1.0 - waited),
    )


def stage_places(name: str, pipeline: int, virtual_stages: int) -> Array:
    """Which stage is chunk v of coordinate p: [chunks, coordinates]."""
    places = np.empty((virtual_stages, pipeline), dtype=int)
    for stage, (coordinate, chunk) in enumerate(placement(name, pipeline, virtual_stages)):
        places[chunk, coordinate] = stage
    return places


def by_coordinate(seconds: Array, places: Array) -> Array:
    """What the chunks of each coordinate add up to, [layouts, coordinates], of `seconds` [layouts, stages]."""
    if len(places) == 1:
        return np.asarray(np.take(seconds, places[0], axis=1))
    holds = (places == np.arange(places.size)[:, None, None]).any(1)
    return np.asarray(seconds @ holds.astype(float))  # many times as fast as adding up short rows


def bound_rule(name: str) -> int:
    """Which of three rules `bound` applies: schedules with the same one have the same bound where their stages lie in
    the same places."""
    return 2 if name == "1f1b" else int(name in SPLIT_BACKWARD)


def bound(name: str, times: StageTimes, places: Array, num_micro_batches: Array) -> Array:
    """Seconds that a pipeline takes at least, whatever the order of work within its rules. Largest of:

    each coordinate: work comes to it through all stages before its first, all its own work, and the way back from its
    first stage (where backward is not split: a weight gradient put off may come last); the first micro-batch there and
    back; and, under 1F1B, where no coordinate holds more micro-batches than there are stages behind it, as many round
    trips from it as follow one another.
    """
    hops = _hops(places).astype(float)
    transfer = times.transfer_s[:, None]
    both = times.forward_s + times.backward_s
    split = name in SPLIT_BACKWARD
    way_back = 0.0 * both if split else times.backward_s
    passed = times.forward_s + way_back
    before = (np.cumsum(passed, 1) - passed + (1.0 if split else 2.0) * transfer * hops).take(places[0], axis=1)
    counts = num_micro_batches[:, None].astype(float)
    own = by_coordinate(both, places) * counts
    result: Array = (before + own).max(1)
    deferred = times.weight_s.sum(1) if split else 0.0
    result = np.maximum(result, both.sum(1) - deferred + 2.0 * hops[-1] * times.transfer_s)
    if name != "1f1b":
        return result
    held = places.shape[1] - np.arange(places.shape[1], dtype=float)
    after = np.cumsum(both[:, ::-1], 1)[:, ::-1] + 2.0 * (held - 1) * transfer
    trips = np.ceil(counts / held)
    return np.asarray(np.maximum(result, (before + trips * after).max(1)))


def _hops(places: Array) -> Array:
    """For each stage, messages between coordinates on the way to it from the first; a V turns without one."""
    coordinate = np.argmax((places[None] == np.arange(places.size)[:, None, None]).any(1), axis=1)
    return np.concatenate(([0], np.cumsum(np.diff(coordinate) != 0)))


def replay(
    name: str, times: StageTimes, index: int, pipeline: int, virtual_stages: int, num_micro_batches: int
) -> Walk:
    """Walk the named schedule with the times of layout `index`."""
    seconds = dict(zip(KINDS, _seconds(times, index), strict=True))
    transfer_s = float(times.transfer_s[index])

    def action_s(stage: int, action: Action) -> float:
        return float(seconds[action.kind][stage])

    def hop_s(transfer: Transfer) -> float:
        return transfer_s

    return walk(schedule(name, pipeline, virtual_stages, num_micro_batches), action_s, hop_s)


def replay_s(
    name: str, times: StageTimes, index: int, pipeline: int, virtual_stages: int, num_micro_batches: int
) -> float:
    """Seconds from the first forward to the last backward, transfers included: `replay(…).step_s`, made for speed."""
    numbered = _steps(name, pipeline, virtual_stages, num_micro_batches)
    return step_s(numbered, _seconds(times, index), float(times.transfer_s[index]))


@functools.lru_cache(maxsize=8)
def _steps(name: str, pipeline: int, virtual_stages: int, num_micro_batches: int) -> Steps:
    return steps(schedule(name, pipeline, virtual_stages, num_micro_batches))


def _seconds(times: StageTimes, index: int) -> tuple[list[float], ...]:
    """Seconds of layout `index` by kind of action, in the order of KINDS, and stage."""
    forward, backward, weight = times.forward_s[index], times.backward_s[index], times.weight_s[index]
    return forward.tolist(), backward.tolist(), (backward - weight).tolist(), weight.tolist()
