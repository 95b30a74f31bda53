"""Explain: one layout in full. Memory by kind and stage, time by kind, every message with bytes, link and seconds, and
the formulas with their numbers filled in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from phalanx.plan.plan import Plan
from phalanx.plan.stages import split
from phalanx.planner.advice import NAMES
from phalanx.planner.compute import peak_flops
from phalanx.planner.costs import ELEMENT_BYTES
from phalanx.planner.engine import OURS, engine
from phalanx.planner.memory import KINDS
from phalanx.planner.messages import Priced, by_order, of_layer, of_step
from phalanx.units import format_bytes, format_flops_per_s, format_seconds


def explain(plan: Plan, engine_name: str = OURS) -> str:
    """Everything about one plan that the named engine shall run, as text."""
    assert plan.prediction is not None, "only a plan with a prediction can be explained"
    sections = (
        _memory(plan),
        _time(plan),
        _messages(plan, engine_name),
        _formulas(plan, engine_name),
        _assumptions(plan),
    )
    return "\n\n".join("\n".join(section) for section in ([f"{plan.model.name}: {plan.layout}"], *sections))


def _memory(plan: Plan) -> Iterator[str]:
    assert plan.prediction is not None
    limit = plan.cluster.device.memory_bytes
    yield f"Memory by pipeline rank (of {format_bytes(limit)})"
    shown = [kind for kind in KINDS if any(stage.get(kind) for stage in plan.prediction.memory_bytes)]
    stages = split(plan.model, plan.job.seq_len, plan.layout.num_stages, plan.layout.stage_layers, plan.layout.tensor)
    for number, stage in enumerate(plan.prediction.memory_bytes):
        parts = ", ".join(f"{kind} {format_bytes(stage[kind])}" for kind in shown if stage[kind])
        layers = sum(len(s.layers) for s in stages[number :: plan.layout.pipeline])
        yield f"  {number}: {format_bytes(sum(stage.values()))} ({layers} layers): {parts}"


def _time(plan: Plan) -> Iterator[str]:
    assert plan.prediction is not None
    yield f"Time of a step: {format_seconds(plan.prediction.step_s)}, on the pipeline rank with most work"
    for kind, seconds in plan.prediction.step_s_by_kind.items():
        share = seconds / plan.prediction.step_s
        name, _, _ = NAMES.get(kind, kind).partition(" (")
        yield f"  {format_seconds(seconds):>10} {share:6.1%}  {name}"


def _messages(plan: Plan, engine_name: str) -> Iterator[str]:
    assert plan.prediction is not None
    rows = of_step(plan, engine_name)
    yield "Messages of one step of the first rank, if nothing hid them"
    if not rows:
        yield "  none"
        return
    yield from _listed(rows)
    total, compute = sum(row.seconds for row in rows), plan.prediction.step_s_by_kind["compute"]
    yield f"  all: {format_seconds(total)}; compute / communication {compute / total:.2f}"
    yield from _orders(plan, engine_name)
    layer = of_layer(plan, engine_name)
    if layer:
        yield "Messages of one layer and micro-batch, forward and backward"
        yield from _listed(layer)
        size, seconds = sum(row.message.payload_bytes for row in layer), sum(row.seconds for row in layer)
        yield f"  all: {format_bytes(size)}, {format_seconds(seconds)}"


def _orders(plan: Plan, engine_name: str) -> Iterator[str]:
    """What the same messages would take were ranks numbered otherwise."""
    seconds = by_order(plan, engine_name)
    if seconds:
        (ours, least), *others = seconds.items()
        yield f"  axes are numbered {', '.join(ours)}, the last one fastest; in other orders, of the same messages:"
        for order, total in sorted(others, key=lambda entry: entry[1]):
            yield f"    {', '.join(order):28} {format_seconds(total):>10}  {total / least:.2f} times as long"


def _listed(rows: Iterable[Priced]) -> Iterator[str]:
    """One line for each kind of message and size; chunks of one rank send the same."""
    alike: dict[tuple[str, str, str, float, str], tuple[int, float]] = {}
    for row in rows:
        message = row.message
        key = (message.group, message.purpose, message.operation, message.payload_bytes / message.count, row.link)
        count, seconds = alike.get(key, (0, 0.0))
        alike[key] = count + message.count, seconds + row.seconds
    for (group, purpose, operation, size, link), (count, seconds) in alike.items():
        yield (
            f"  {group:13} {purpose:28} {count:6} × {operation:14} "
            f"{format_bytes(size):>10}  {format_seconds(seconds):>10}  {link}"
        )


def _states(plan: Plan, engine_name: str) -> str:
    """Model states of the first pipeline rank, as N × (parameter + gradient + optimizer)."""
    assert plan.prediction is not None
    layout, held = plan.layout, plan.prediction.memory_bytes[0]
    size, shards = engine(engine_name).states_for(plan.job.precision).parameter, layout.num_shards * layout.context
    stages = {"parameters": 3, "gradients": 2, "optimizer": 1}
    cuts = {kind: shards if layout.zero >= stage else 1 for kind, stage in stages.items()}
    elements, total = held["parameters"] * cuts["parameters"] / size, sum(held[kind] for kind in stages)
    parts = (f"{held[kind] * cut / elements:.3g}" + (f" / {cut}" if cut > 1 else "") for kind, cut in cuts.items())
    return (
        f"  model states of pipeline rank 0 = N (parameter + gradient + optimizer), cut as ZeRO {layout.zero} does = "
        f"{elements:,.0f} × ({' + '.join(parts)}) bytes = {format_bytes(total)}"
    )


def _dearest(rows: Sequence[Priced]) -> Iterator[str]:
    """The collective that takes most of a step, by its bus bandwidth (nccl-tests, PERFORMANCE.md)."""
    collectives = [row for row in rows if row.message.operation in ("all_reduce", "all_gather", "reduce_scatter")]
    if not collectives:
        return
    row = max(collectives, key=lambda row: row.seconds)
    message, rounds = row.message, 2 if row.message.operation == "all_reduce" else 1
    each, size = row.seconds / message.count, message.payload_bytes / message.count
    moved = rounds * (row.num_ranks - 1) / row.num_ranks * size
    yield (
        f"  one {message.operation} of {message.purpose} = {rounds} (n - 1) / n × M / bus bandwidth = {rounds} × "
        f"({row.num_ranks} - 1) / {row.num_ranks} × {format_bytes(size)} / {moved / each / 1e9:,.3g} GB/s "
        f"= {format_seconds(each)}, latency included"
    )


def _formulas(plan: Plan, engine_name: str) -> Iterator[str]:
    assert plan.prediction is not None
    model, job, layout = plan.model, plan.job, plan.layout
    flops = model.flops_per_token(job.seq_len)
    micro_batches = layout.num_micro_batches(job.global_batch)
    yield "Formulas with their numbers"
    yield (
        f"  model FLOPs per token = 3 × (layers × (2 × matrices + 4 s a d) + 2 h V) = {flops / 1e9:,.4g} GFLOP; "
        f"× {job.tokens_per_step:,} tokens per step / {layout.num_ranks} devices"
    )
    yield (
        f"  micro-batches m = global batch / (data × micro-batch) = {job.global_batch} / ({layout.data} × "
        f"{layout.micro_batch}) = {micro_batches}"
    )
    peak = peak_flops(plan.cluster.device, job.precision)
    step_s = plan.prediction.step_s
    mfu = flops * job.tokens_per_step / (step_s * layout.num_ranks * peak)
    yield (
        f"  MFU = model FLOPs per step / (step × devices × peak) = {flops * job.tokens_per_step:.3e} / "
        f"({step_s:.4g} s × {layout.num_ranks} × {format_flops_per_s(peak)}) = {mfu:.1%}"
    )
    if not model.num_experts:  # experts are cut over their copies only
        yield _states(plan, engine_name)
    if layout.pipeline > 1:
        bubble = (layout.pipeline - 1) / (micro_batches * layout.virtual_stages + layout.pipeline - 1)
        yield (
            f"  bubble of 1f1b with equal stages = (p - 1) / (m v + p - 1) = ({layout.pipeline} - 1) / "
            f"({micro_batches} × {layout.virtual_stages} + {layout.pipeline} - 1) = {bubble:.1%}"
        )
    if layout.tensor > 1:
        size = ELEMENT_BYTES[job.precision]
        payload = layout.micro_batch * job.seq_len * model.hidden * size
        yield (
            f"  one tensor-axis message = b s h × {size} bytes = {layout.micro_batch} × {job.seq_len} × "
            f"{model.hidden} × {size} = {format_bytes(payload)}"
        )
    yield from _dearest(of_step(plan, engine_name))


def _assumptions(plan: Plan) -> Iterator[str]:
    assert plan.prediction is not None
    yield "Assumptions"
    for text in plan.prediction.assumptions:
        yield f"  {text}"
    for field, source in sorted(plan.cluster.sources.items()):
        yield f"  {field}: {source}"
