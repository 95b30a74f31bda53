"""Advice: the winner's reason in words, what others lose, and when two layouts cannot be told apart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.plan.layout import AXES
from phalanx.plan.plan import Plan
from phalanx.planner.machinery import NEAR
from phalanx.units import format_bytes, format_seconds

HUGE = 100e9
"""Parameters from which on published runs used all three axes (SC21 table 1: tensor and pipeline from 39B on)."""


MEMORY_ERROR = 0.06
"""Median error of predicted memory over published runs that print it (docs/log/2026-11-29-planner-accuracy.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The best layout of one kind, `slower` than the winner by this share (below 0 where the winner needs less
    machinery for about the same time) because of this; or None, and why there is none."""

    plan: Plan | None
    slower: float
    because: str


def step_s(plan: Plan) -> float:
    """Predicted seconds of a step."""
    assert plan.prediction is not None, "a plan without prediction cannot be compared"
    return plan.prediction.step_s


def difference(plan: Plan, winner: Plan) -> str:
    """The kinds of time that `plan` spends more of than `winner`, as words: the largest, up to MOST of their sum."""
    assert plan.prediction is not None and winner.prediction is not None
    ours, theirs = plan.prediction.step_s_by_kind, winner.prediction.step_s_by_kind
    more = {kind: ours[kind] - theirs.get(kind, 0.0) for kind in ours}
    losses = sorted(((seconds, kind) for kind, seconds in more.items() if seconds > 0), reverse=True)
    words, told, total = list[str](), 0.0, sum(seconds for seconds, _ in losses)
    for seconds, kind in losses[:3]:
        if told < MOST * total:
            words.append(f"{format_seconds(seconds)} {'' if words else 'more '}in {NAMES.get(kind, kind)}")
        told += seconds
    return ", ".join(words) or "no slower in any part"


MOST = 0.75
"""Of what a layout loses, at least so much is told by kind, in three kinds at most."""

NAMES = {
    "tensor": "messages inside layers",
    "data": "messages of the data axis",
    "pipeline": "waiting for other stages",
    "transfer": "messages between stages",
    "gathers": "gathering parameters",
    "recompute": "computing activations again",
    "compute": "compute",
    "host": "issuing kernels",
    "optimizer": "the optimizer",
}


def reasons(
    plans: Sequence[Plan], fastest: Plan, shapes: Mapping[str, Compared], tie: float, given: Mapping[str, Any]
) -> tuple[str, ...]:
    """Why the first plan won: what shape of problem this is, and what [layout] had `given`; what its time goes to; why
    it goes before the `fastest`, if that is another; what cannot be told from it."""
    winner = plans[0]
    kept = ", ".join(f"{key} = {_written(value)}" for key, value in given.items())
    sizes = math.prod(given.get(axis, 1) for axis in AXES)
    if sizes == winner.cluster.num_devices > 1:
        words = ["[layout] gives the axes; the rest is chosen"]
    else:
        words = [_shape(winner, shapes) + (f"; [layout] keeps {kept}" if kept else "")]
    words += [_time(winner), *_idle(winner), *_batch(winner, given), *_simpler(winner, fastest)]
    close = [plan for plan in plans[1:] if step_s(plan) <= step_s(winner) * (1 + tie)]
    if close:
        words.append(
            f"the first {len(close) + 1} lie within {tie:.0%}, less than predictions err between layouts of one model: "
            "they cannot be told apart; try them"
        )
    return tuple(words)


def _written(value: Any) -> str:
    """A value of [layout] as a run file has it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def compared(entry: Compared) -> str:
    """What a layout of one kind loses, as words; "" for the winner itself."""
    if entry.plan is None:
        return f"out: {entry.because}"
    if entry.slower < -0.0005:
        return f"gains {-entry.slower:.1%} at most, with more machinery"
    if abs(entry.slower) <= 0.0005:
        return "as fast, with more machinery"
    if entry.slower > 1:
        return f"takes {1 + entry.slower:.1f} times as long: {entry.because}"
    return f"loses {entry.slower:.1%}: {entry.because}"


def _idle(plan: Plan) -> list[str]:
    """Said where [layout] asks for fewer ranks than there are devices."""
    used, there = plan.layout.num_ranks, plan.cluster.num_devices
    return [f"{there - used} of {there} devices stay idle: [layout] leaves no way to use them"] if used < there else []


def _batch(plan: Plan, given: Mapping[str, Any]) -> list[str]:
    """Said where the data axis is as large as the batch divides by, and could be larger beside what is `given`."""
    devices = plan.cluster.num_devices // math.prod(given.get(axis, 1) for axis in AXES)
    batch, each = plan.job.global_batch, given.get("micro_batch", 1)
    most = math.gcd(batch // each, devices)
    if "data" in given or plan.layout.data != most or most == devices:
        return []
    near = max(1, round(batch / (devices * each))) * devices * each
    shared = "a data axis" if most == 1 else f"more than {most} data ranks"
    over = f"all {devices:,} devices" if devices == plan.cluster.num_devices else f"{devices:,} data ranks"
    return [f"a global batch of {batch:,} leaves no way to {shared}: {near:,} would divide over {over}"]


def _simpler(first: Plan, fastest: Plan) -> list[str]:
    """Why `first` goes before the `fastest`, if that is any faster."""
    gain = step_s(first) / step_s(fastest) - 1.0
    if gain < 0.0005:
        return []
    return [
        f"the first needs the least machinery of all within {NEAR:.0%} of the fastest, which gains {gain:.1%}: "
        f"{fastest.layout}"
    ]


def _shape(plan: Plan, shapes: Mapping[str, Compared]) -> str:
    """What kind of case this is; `shapes` know what else fits."""
    layout, model = plan.layout, plan.model
    whole = layout.tensor * layout.pipeline * layout.context == 1
    if layout.num_ranks == 1:
        return "one device: nothing to cut"
    if whole and layout.zero < 3:
        return "the model fits one device: data parallelism alone, the fewest messages"
    if whole:
        return _cut_over_data(shapes.get("data alone"))
    if model.num_parameters >= HUGE and min(layout.tensor, layout.pipeline, layout.data) > 1:
        return "100B parameters and more: tensor inside the node, pipeline across nodes, data with what is left"
    if layout.tensor == 1:
        inside = "experts over neighbours on it" if model.num_experts else "without a message inside a layer"
        return f"deep but narrow: pipeline and data, {inside}"
    if layout.pipeline == 1:
        start = "one layer is too large for a device" if _out(shapes, *UNCUT) else "wide layers"
        rest = "parameters cut over the data axis as well" if layout.zero == 3 else "no pipeline to fill"
        return f"{start}: cut over the tensor axis, {rest}"
    start = "too large for one axis" if _out(shapes, *UNCUT, "tensor and data") else "faster than with fewer axes"
    return f"{start}: layers cut inside the node, stages across nodes"


UNCUT = ("data alone", "data alone, ZeRO 3", "pipeline and data")
"""Shapes that leave layers whole."""


def _out(shapes: Mapping[str, Compared], *names: str) -> bool:
    """Whether some of these shapes were looked at, and none fits."""
    looked_at = [shapes[name] for name in names if name in shapes]
    return bool(looked_at) and all(entry.plan is None for entry in looked_at)


def _cut_over_data(uncut: Compared | None) -> str:
    """Why parameters are cut over the data axis (ZeRO 3) though nothing else is; `uncut`: the best that does not."""
    if uncut is None:
        return "parameters cut over the data axis, layers and stages whole"
    if uncut.plan is None:
        return "a layer fits one device, the whole model does not: parameters cut over the data axis"
    if uncut.slower <= NEAR:
        return "the model fits one device; cutting its parameters over the data axis as well costs next to nothing here"
    return "parameters fit one device whole; cut over the data axis as well, they leave room for activations"


def _time(plan: Plan) -> str:
    """Where the winner's time goes, and what limits it."""
    assert plan.prediction is not None
    kinds = plan.prediction.step_s_by_kind
    worst = max((kind for kind in kinds if kind != "compute"), key=lambda kind: kinds[kind])
    share, total = kinds[worst] / plan.prediction.step_s, kinds["compute"] / plan.prediction.step_s
    largest = max(sum(stage.values()) for stage in plan.prediction.memory_bytes)
    room = plan.cluster.device.memory_bytes - largest
    close = room < MEMORY_ERROR * plan.cluster.device.memory_bytes
    return (
        f"{total:.0%} of a step is arithmetic; the largest other part is {NAMES.get(worst, worst)} ({share:.1%}); "
        f"{format_bytes(room)} of memory stay free"
        + (f", less than the {MEMORY_ERROR:.0%} that predictions of it err by" if close else "")
    )
