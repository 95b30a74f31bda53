"""Explain: one layout in full. Memory by kind and stage, time by kind, every message with bytes, link and seconds, and
the formulas with their numbers filled in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from phalanx.plan.plan import Plan
from phalanx.planner.advice import NAMES
from phalanx.planner.candidates import of
from phalanx.planner.engine import OURS, engine
from phalanx.planner.estimate import Footprint, footprints
from phalanx.planner.formulas import formulas
from phalanx.planner.memory import KINDS
from phalanx.planner.messages import Priced, by_order, of_layer, of_step
from phalanx.units import format_bytes, format_seconds


def explain(plan: Plan, engine_name: str = OURS) -> str:
    """Everything about one plan that the named engine shall run, as text."""
    assert plan.prediction is not None, "only a plan with a prediction can be explained"
    runner = engine(engine_name, plan.job)
    (footprint,) = footprints(plan.model, plan.job, plan.cluster, runner, of([plan.layout]))
    messages = of_step(plan, engine_name)
    sections = (
        _memory(plan, footprint),
        _time(plan),
        _messages(plan, engine_name, messages),
        _layer(plan, engine_name, footprint),
        ("Formulas with their numbers", *(f"  {line}" for line in formulas(plan, runner, footprint, messages))),
        _assumptions(plan),
    )
    texts = ["\n".join(section) for section in ([f"{plan.model.name}: {plan.layout}"], *sections)]
    return "\n\n".join(text for text in texts if text)


def _memory(plan: Plan, footprint: Footprint) -> Iterator[str]:
    assert plan.prediction is not None
    limit = plan.cluster.device.memory_bytes
    yield f"Memory by pipeline rank (of {format_bytes(limit)})"
    for number, (stage, layers) in enumerate(
        zip(plan.prediction.memory_bytes, footprint.layers.sum(0).tolist(), strict=True)
    ):
        parts = ", ".join(f"{kind} {format_bytes(stage[kind])}" for kind in KINDS if stage.get(kind))
        yield f"  {number}: {format_bytes(sum(stage.values()))} ({layers} layers): {parts}"


def _time(plan: Plan) -> Iterator[str]:
    assert plan.prediction is not None
    step_s = plan.prediction.step_s
    yield f"Time of a step: {format_seconds(step_s)}, on the pipeline rank with most work"
    for kind, seconds in plan.prediction.step_s_by_kind.items():
        if seconds > 1e-9 * step_s:  # less is what rounding left
            yield f"  {format_seconds(seconds):>10} {seconds / step_s:6.1%}  {NAMES.get(kind, kind)}"


def _messages(plan: Plan, engine_name: str, rows: Sequence[Priced]) -> Iterator[str]:
    assert plan.prediction is not None
    yield "Messages of one step of the first rank, if nothing hid them"
    if not rows:
        yield "  none"
        return
    yield from _listed(rows)
    total, compute = sum(row.seconds for row in rows), plan.prediction.step_s_by_kind["compute"]
    yield f"  all: {format_seconds(total)}; compute / communication {compute / total:.2f}"
    seconds = by_order(plan, engine_name)
    if seconds:
        (ours, least), *others = seconds.items()
        yield f"  axes are numbered {', '.join(ours)}, the last one fastest; in other orders, of the same messages:"
        for order, total in sorted(others, key=lambda entry: entry[1]):
            yield f"    {', '.join(order):28} {format_seconds(total):>10}  {total / least:.2f} times as long"


def _layer(plan: Plan, engine_name: str, footprint: Footprint) -> Iterator[str]:
    """Of one layer, what it sends and how that compares to what it computes."""
    rows = of_layer(plan, engine_name)
    if rows:
        yield "Messages of one layer and micro-batch, forward and backward"
        yield from _listed(rows)
        size, seconds = sum(row.message.payload_bytes for row in rows), sum(row.seconds for row in rows)
        costs = footprint.costs
        compute = sum(float(costs.at(part.compute_s)[0]) for part in (costs.layer_forward, costs.layer_backward))
        yield (
            f"  all: {format_bytes(size)}, {format_seconds(seconds)}; its compute takes {format_seconds(compute)}: "
            f"compute / communication {compute / seconds:.2f}"
        )


def _listed(rows: Iterable[Priced]) -> Iterator[str]:
    """One line for each kind of message and size; chunks of one rank send the same."""
    alike: dict[tuple[str, str, str, float, str], tuple[int, float]] = {}
    for row in rows:
        message = row.message
        key = (message.group, message.purpose, message.operation, message.payload_bytes / message.count, row.link)
        count, seconds = alike.get(key, (0, 0.0))
        alike[key] = count + message.count, seconds + row.seconds
    for (group, purpose, operation, size, link), (count, seconds) in alike.items():
        priced = f"{format_bytes(size):>10}  {format_seconds(seconds):>10}" if size else f"{'the sender counts it':>22}"
        yield f"  {group:13} {purpose:28} {count:6} × {operation:14} {priced}  {link}"


def _assumptions(plan: Plan) -> Iterator[str]:
    assert plan.prediction is not None
    yield "Assumptions"
    for text in plan.prediction.assumptions:
        yield f"  {text}"
    for field, source in sorted(plan.cluster.sources.items()):
        yield f"  {field}: {source}"
