"""Summary: what a Plan means in the units that people compare: tokens/s, FLOP/s, days, shares of a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phalanx.plan.plan import Plan
from phalanx.planner import certainty
from phalanx.planner.compute import peak_flops
from phalanx.planner.engine import OURS
from phalanx.planner.messages import Priced, of_layer, of_step
from phalanx.planner.search import Search
from phalanx.units import format_bytes, format_seconds

COMMUNICATION = ("tensor", "gathers", "transfer", "data")
"""Kinds of time that are waiting for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One line of the ranked table. `low_s` and `high_s` hold four of five measured runs of its kind. MFU counts
    model FLOPs with the full attention core, without recompute."""

    layout: str
    step_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    flops_per_s_per_device: float
    mfu: float
    memory_bytes: int
    fullest_stage: int
    communication: float
    bubble: float
    days: float
    device_hours: float


def summary(plan: Plan, engine_name: str = OURS) -> Summary:
    """The line of one plan that has a Prediction, made for the named engine."""
    assert plan.prediction is not None, "a plan without prediction has no summary"
    predicted, job, devices = plan.prediction, plan.job, plan.layout.num_ranks
    flops = plan.model.flops_per_token(job.seq_len) * job.tokens_per_step / (predicted.step_s * devices)
    stages = [sum(stage.values()) for stage in predicted.memory_bytes]
    kinds = predicted.step_s_by_kind
    likely = certainty.likely(plan.layout, plan.cluster, engine_name)
    run_s = predicted.step_s * job.num_steps
    return Summary(
        layout=str(plan.layout),
        step_s=predicted.step_s,
        low_s=predicted.step_s * likely.low,
        high_s=predicted.step_s * likely.high,
        tokens_per_s=job.tokens_per_step / predicted.step_s,
        flops_per_s_per_device=flops,
        mfu=flops / peak_flops(plan.cluster.device, job.precision),
        memory_bytes=max(stages),
        fullest_stage=stages.index(max(stages)),
        communication=sum(kinds[kind] for kind in COMMUNICATION) / predicted.step_s,
        bubble=kinds["pipeline"] / predicted.step_s,
        days=run_s / 86400,
        device_hours=run_s * devices / 3600,
    )


COLUMNS = (
    "layout",
    "step",
    "likely",
    "tokens/s",
    "TFLOP/s",
    "MFU",
    "memory",
    "comm.",
    "bubble",
    "run",
)


def cells(line: Summary) -> tuple[str, ...]:
    """A line as text, one entry per column of COLUMNS."""
    return (
        line.layout,
        format_seconds(line.step_s),
        _range(line.step_s, line.low_s, line.high_s),
        f"{line.tokens_per_s:,.0f}",
        f"{line.flops_per_s_per_device / 1e12:,.3g}",
        f"{line.mfu:.0%}" if line.mfu >= 0.1 else f"{line.mfu:.1%}",
        format_bytes(line.memory_bytes),
        f"{line.communication:.1%}",
        f"{line.bubble:.1%}",
        _short(line.days * 86400),
    )


def _short(seconds: float) -> str:
    """As `47 min` or `8.9 d`."""
    number, unit = format_seconds(seconds).split(" ")
    value = float(number.replace(",", ""))
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def _range(step_s: float, low_s: float, high_s: float) -> str:
    """As `7.13–8.75`, in the unit that `step_s` is printed in."""
    scale = float(format_seconds(step_s).split(" ")[0].replace(",", "")) / step_s
    return "–".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (scale * low_s, scale * high_s))


def whole_run(plan: Plan) -> str:
    """What all steps of the job cost with this plan, as text."""
    line = summary(plan)
    hours = f", {line.device_hours:,.0f} device-hours" if line.device_hours >= 1 else ""
    return f"all {plan.job.num_steps:,} steps take {format_seconds(line.days * 86400)}{hours}"


def summaries(found: Search) -> tuple[Summary, ...]:
    """One line per plan, best first."""
    return tuple(summary(plan, found.engine) for plan in found.plans)


def rejections(found: Search) -> tuple[str, ...]:
    """Why the others are out, as text."""
    return tuple(
        f"{entry.count:,} rejected: {entry.reason}\n    {entry.example}: {entry.detail}\n    → {entry.instead}"
        for entry in found.rejected
    )


def as_json(found: Search) -> dict[str, Any]:
    """Everything that a search found, as plain values; keys are stable."""
    return {
        "engine": found.engine,
        "num_layouts": found.num_layouts,
        "num_fitting": found.num_fitting,
        "num_replayed": found.num_replayed,
        "plans": [_plan(plan, found.engine) for plan in found.plans],
        "messages": [_message(row) for row in of_step(found.plans[0], found.engine)],
        "layer_messages": [_message(row) for row in of_layer(found.plans[0], found.engine)],
        "reasons": list(found.reasons),
        "scan": [
            {
                "tensor": entry.tensor,
                "slower": None if entry.plan is None else entry.slower,
                "because": entry.because,
                "plan": None if entry.plan is None else _plan(entry.plan, found.engine),
            }
            for entry in found.scan
        ],
        "front": [_plan(plan, found.engine) for plan in found.front],
        "rejected": [
            {
                "reason": r.reason,
                "count": r.count,
                "example": asdict(r.example),
                "detail": r.detail,
                "instead": r.instead,
            }
            for r in found.rejected
        ],
    }


def _message(row: Priced) -> dict[str, Any]:
    message = row.message
    keys = ("group", "purpose", "operation", "count", "payload_bytes")
    return {**{key: getattr(message, key) for key in keys}, "link": row.link, "seconds": row.seconds}


def _plan(plan: Plan, engine_name: str) -> dict[str, Any]:
    assert plan.prediction is not None
    predicted = plan.prediction
    return {
        "layout": asdict(plan.layout),
        **{key: value for key, value in asdict(summary(plan, engine_name)).items() if key != "layout"},
        "step_s_by_kind": dict(predicted.step_s_by_kind),
        "memory_bytes_by_stage": [dict(stage) for stage in predicted.memory_bytes],
        "assumptions": list(predicted.assumptions),
    }
