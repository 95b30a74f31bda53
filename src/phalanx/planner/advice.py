"""Advice: the winner's reason in words, the scan that an expert would make by hand, and when two layouts cannot be told
apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.plan import Plan
from phalanx.planner.machinery import NEAR
from phalanx.units import format_bytes, format_seconds

HUGE = 100e9
"""Parameters from which on published runs used all three axes (SC21 table 1: tensor and pipeline from 39B on)."""


MEMORY_ERROR = 0.06
"""Median error of predicted memory over published runs that print it (docs/log/2026-11-29-planner-accuracy.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """The best layout with one tensor size, or why there is none; `slower` than the winner by this share (below 0 where
    the winner needs less machinery for about the same time), and `because` of this."""

    tensor: int
    plan: Plan | None
    slower: float
    because: str


def step_s(plan: Plan) -> float:
    """Predicted seconds of a step."""
    assert plan.prediction is not None, "a plan without prediction cannot be compared"
    return plan.prediction.step_s


def difference(plan: Plan, winner: Plan) -> str:
    """The kind of time that `plan` spends most more of than `winner`, as words."""
    assert plan.prediction is not None and winner.prediction is not None
    ours, theirs = plan.prediction.step_s_by_kind, winner.prediction.step_s_by_kind
    kind = max(ours, key=lambda name: ours[name] - theirs.get(name, 0.0))
    more = ours[kind] - theirs.get(kind, 0.0)
    return f"{format_seconds(more)} more in {NAMES.get(kind, kind)}" if more > 0 else "no slower in any part"


NAMES = {
    "tensor": "messages inside layers",
    "data": "messages of the data axis",
    "pipeline": "waiting for other stages",
    "transfer": "messages between stages",
    "gathers": "gathering parameters",
    "recompute": "computing activations again",
    "compute": "compute (smaller or fewer products per device)",
    "host": "issuing kernels",
    "optimizer": "the optimizer",
}


def reasons(
    plans: Sequence[Plan], fastest: Plan, scan: Sequence[Scanned], tie: float, *, given: bool
) -> tuple[str, ...]:
    """Why the first plan won: what shape of problem this is, what its time goes to, what comes closest; why it goes
    before the `fastest`, if that is another. `given`: the axes were not chosen."""
    winner = plans[0]
    assert winner.prediction is not None
    words = ["[layout] gives the axes; the rest is chosen" if given else _shape(winner, scan), _time(winner)]
    words += _idle(winner) + _simpler(winner, fastest)
    for entry in scan:
        if entry.plan is not None and entry.tensor != winner.layout.tensor:
            words.append(_compared(entry))
        elif entry.plan is None:
            words.append(f"tensor {entry.tensor} is out: {entry.because}")
    close = [plan for plan in plans[1:] if step_s(plan) <= step_s(winner) * (1 + tie)]
    if close:
        words.append(
            f"the first {len(close) + 1} lie within {tie:.0%}, less than predictions err between layouts of one model: "
            "they cannot be told apart; try them"
        )
    return tuple(words)


def _compared(entry: Scanned) -> str:
    if entry.plan is not None and entry.slower < 0:
        how = f"gains {-entry.slower:.1%} at most" if entry.slower <= -0.0005 else "is as fast"
        return f"tensor {entry.tensor} {how}, with more machinery: {entry.plan.layout}"
    return f"tensor {entry.tensor} loses {entry.slower:.1%}: {entry.because}"


def _idle(plan: Plan) -> list[str]:
    """Said where [layout] asks for fewer ranks than there are devices."""
    used, there = plan.layout.num_ranks, plan.cluster.num_devices
    return [f"{there - used} of {there} devices stay idle: [layout] leaves no way to use them"] if used < there else []


def _simpler(first: Plan, fastest: Plan) -> list[str]:
    """Why `first` goes before the `fastest`, if that is any faster."""
    gain = step_s(first) / step_s(fastest) - 1.0
    if gain < 0.0005:
        return []
    return [
        f"the first needs the least machinery of all within {NEAR:.0%} of the fastest, which gains {gain:.1%}: "
        f"{fastest.layout}"
    ]


def _shape(plan: Plan, scan: Sequence[Scanned]) -> str:
    """What kind of case this is; the `scan` knows whether anything fits without a tensor axis."""
    layout, model = plan.layout, plan.model
    whole = layout.tensor * layout.pipeline * layout.context == 1 and layout.zero < 3
    if layout.num_ranks == 1:
        return "one device: nothing to cut"
    if whole:
        return "the model fits one device: data parallelism alone, the fewest messages"
    if layout.zero == 3 and layout.tensor * layout.pipeline == 1 and _fits_whole(plan):
        return "the model fits one device; cutting its parameters over the data axis as well costs next to nothing here"
    if layout.zero == 3 and layout.tensor * layout.pipeline == 1:
        return "a layer fits one device, the whole model does not: parameters cut over the data axis"
    if model.num_parameters >= HUGE and min(layout.tensor, layout.pipeline, layout.data) > 1:
        return "100B parameters and more: tensor inside the node, pipeline across nodes, data with what is left"
    if layout.tensor == 1:
        inside = "experts over neighbours on it" if model.num_experts else "without a message inside a layer"
        return f"deep but narrow: pipeline and data, {inside}"
    if layout.pipeline == 1:
        alone = all(entry.plan is None for entry in scan if entry.tensor == 1)
        start = "one layer is too large for a device" if alone and scan[0].tensor == 1 else "wide layers"
        rest = "parameters cut over the data axis as well" if layout.zero == 3 else "no pipeline to fill"
        return f"{start}: cut over the tensor axis, {rest}"
    return "too large for one axis: layers cut inside the node, stages across nodes"


def _fits_whole(plan: Plan) -> bool:
    """Whether parameters, gradients and optimizer states fit one device uncut, at Megatron's 18 bytes per parameter."""
    return 18 * plan.model.num_parameters < plan.cluster.device.memory_bytes


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
