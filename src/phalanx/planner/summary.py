"""Summary: what a Plan means in the units that people compare: tokens/s, FLOP/s, days, shares of a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phalanx.plan.plan import Plan
from phalanx.planner import certainty
from phalanx.planner.advice import Compared, compared, step_s
from phalanx.planner.compute import peak_flops
from phalanx.planner.engine import OURS
from phalanx.planner.messages import Priced, of_layer, of_step
from phalanx.planner.ranking import TOO_LARGE
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
    "device-h",
)
"""TFLOP/s of one device, memory of the fullest stage, shares of exposed communication and of the bubble; the time and
the device-hours of all steps."""


def cells(line: Summary) -> tuple[str, ...]:
    """A line as text, one entry per column of COLUMNS."""
    return (
        line.layout,
        format_seconds(line.step_s),
        _range(line.step_s, line.low_s, line.high_s),
        f"{line.tokens_per_s:,.0f}",
        _three_digits(line.flops_per_s_per_device / 1e12),
        f"{line.mfu:.0%}" if line.mfu >= 0.1 else f"{line.mfu:.1%}",
        format_bytes(line.memory_bytes),
        f"{line.communication:.1%}",
        f"{line.bubble:.1%}",
        _short(line.days * 86400),
        _hours(line.device_hours),
    )


def _three_digits(value: float) -> str:
    """As `0.0104`, `215` or `52,016`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _hours(value: float) -> str:
    """As `<0.01`, `23.4`, `52,046` or `1.2 M`."""
    if value < 0.01:
        return "<0.01"
    return _three_digits(value) if value < 1e6 else f"{value / 1e6:.3g} M"


def _short(seconds: float) -> str:
    """As `47 min` or `8.9 d`."""
    number, unit = format_seconds(seconds).split(" ")
    value = float(number.replace(",", ""))
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def _range(step_s: float, low_s: float, high_s: float) -> str:
    """As `7.13–8.75`, in the unit that `step_s` is printed in."""
    scale = float(format_seconds(step_s).split(" ")[0].replace(",", "")) / step_s
    return "–".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (scale * low_s, scale * high_s))


def heading(plan: Plan) -> str:
    """What is planned, as text: model, devices and batch, as they were understood."""
    model, cluster, job = plan.model, plan.cluster, plan.job
    nodes = f"{cluster.num_nodes:,} nodes of " if cluster.num_nodes > 1 else ""
    size = model.num_parameters
    count = f"{size / 1e9:,.3g}B" if size >= 1e9 else f"{size / 1e6:.3g}M"
    return (
        f"{model.name}, {count} parameters, on {nodes}{cluster.devices_per_node} × {cluster.device.name}: "
        f"{job.global_batch:,} sequence{'s' if job.global_batch > 1 else ''} of {job.seq_len:,} tokens a step in "
        f"{job.precision}"
    )


def whole_run(plan: Plan) -> str:
    """What all steps of the job cost with this plan, as text."""
    line = summary(plan)
    hours = f", {_three_digits(line.device_hours)} device-hours" if line.device_hours >= 0.01 else ""
    return f"all {plan.job.num_steps:,} steps take {format_seconds(line.days * 86400)}{hours}"


def summaries(found: Search) -> tuple[Summary, ...]:
    """One line per plan, best first."""
    return tuple(summary(plan, found.engine) for plan in found.plans)


def beside(found: Search) -> dict[str, list[tuple[str, ...]]]:
    """By kind ("shape", "tensor size") the best of each: name, step and words. A kind of which there is but one is left
    out, and so are tensor sizes of more than twice the largest that fits."""
    sizes = found.beside.scan
    largest = max((size for size, entry in sizes.items() if entry.plan), default=1)
    near = {f"tensor {size}": entry for size, entry in sizes.items() if size <= 2 * largest}
    kinds = {"shape": found.beside.shapes, "tensor size": near}
    return {
        kind: [(name, *_beside_words(entry, found)) for name, entry in entries.items()]
        for kind, entries in kinds.items()
        if len(entries) > 1
    }


def _beside_words(entry: Compared, found: Search) -> tuple[str, str]:
    if entry.plan is None:
        return "–", compared(entry)
    return format_seconds(step_s(entry.plan)), "the first" if entry.plan == found.plans[0] else compared(entry)


def rejections(found: Search) -> list[tuple[str, ...]]:
    """Why the others are out: how many, and by reason one of them in numbers and the least change that helps."""
    return [
        (
            f"{entry.count:,}",
            f"{entry.reason}, e.g. "
            + (f"{entry.example}: " if entry.reason == TOO_LARGE else "")
            + entry.detail
            + (f" → {entry.instead}" if entry.instead else ""),
        )
        for entry in found.rejected
    ]


def as_json(found: Search) -> dict[str, Any]:
    """Everything that a search found, as plain values; keys are stable."""
    first = found.plans[0]
    return {
        "model": {"name": first.model.name, "num_parameters": first.model.num_parameters},
        "cluster": {"name": first.cluster.name, "num_devices": first.cluster.num_devices},
        "job": {"tokens_per_step": first.job.tokens_per_step, "num_steps": first.job.num_steps},
        "engine": found.engine,
        "num_layouts": found.num_layouts,
        "num_fitting": found.num_fitting,
        "num_replayed": found.num_replayed,
        "plans": [
            {
                **_plan(plan, found.engine),
                "sent_bytes": sum(row.message.payload_bytes for row in of_step(plan, found.engine)),
                "alike": [asdict(each) for each in alike],
            }
            for plan, alike in zip(found.plans, found.alike, strict=True)
        ],
        "messages": [_message(row) for row in of_step(first, found.engine)],
        "layer_messages": [_message(row) for row in of_layer(first, found.engine)],
        "reasons": list(found.reasons),
        "shapes": [{"shape": name, **_beside(entry, found)} for name, entry in found.beside.shapes.items()],
        "scan": [{"tensor": size, **_beside(entry, found)} for size, entry in found.beside.scan.items()],
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


def _beside(entry: Compared, found: Search) -> dict[str, Any]:
    return {
        "slower": None if entry.plan is None else entry.slower,
        "because": entry.because,
        "plan": None if entry.plan is None else _plan(entry.plan, found.engine),
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
