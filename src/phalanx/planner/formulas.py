"""Formulas: what the figures of one plan come from, each formula with its numbers filled in (docs/equations.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.plan import Plan
from phalanx.planner import memory
from phalanx.planner.candidates import of
from phalanx.planner.compute import peak_flops
from phalanx.planner.costs import ELEMENT_BYTES
from phalanx.planner.engine import Engine
from phalanx.planner.estimate import Footprint
from phalanx.planner.messages import Priced
from phalanx.units import format_bytes, format_flops_per_s, format_seconds


def formulas(plan: Plan, runner: Engine, footprint: Footprint, messages: Sequence[Priced]) -> Iterator[str]:
    """One line per formula; `footprint` is that of `plan` alone, `messages` are those of a step of its first rank."""
    layout, job = plan.layout, plan.job
    yield from _speed(plan)
    if not plan.model.num_experts:  # experts are cut over their copies only
        yield _states(plan, runner)
    yield _activations(plan, runner, footprint)
    if layout.pipeline > 1:
        stages, chunks, count = layout.pipeline, layout.virtual_stages, layout.num_micro_batches(job.global_batch)
        bubble = (stages - 1) / (count * chunks + stages - 1)
        yield (
            f"bubble of 1f1b with equal stages = (p - 1) / (m v + p - 1) = ({stages} - 1) / "
            f"({count} × {chunks} + {stages} - 1) = {bubble:.1%}"
        )
    if layout.tensor > 1:
        size, tokens, hidden = ELEMENT_BYTES[job.precision], job.seq_len // layout.context, plan.model.hidden
        yield (
            f"one tensor-axis message = b s h × {size} bytes = {layout.micro_batch} × {tokens} × {hidden} × {size} = "
            f"{format_bytes(layout.micro_batch * tokens * hidden * size)}"
        )
    yield from _dearest(messages)


def _speed(plan: Plan) -> Iterator[str]:
    """From the model's FLOPs to tokens/s, MFU and device-hours."""
    assert plan.prediction is not None
    model, job, layout, step_s = plan.model, plan.job, plan.layout, plan.prediction.step_s
    h, heads, head_dim, ups = model.hidden, model.num_heads, model.head_dim, 3 if model.gated else 2
    experts = f" × {model.experts_per_token} + {h} × {model.num_experts}" if model.num_experts else ""
    flops, core = model.flops_per_token(job.seq_len), 4 * job.seq_len * model.q_rows
    matrices = round((flops / 3 - 2 * h * model.vocab) / model.num_layers - core) // 2
    yield (
        f"matrices of a layer = 2 h d (a + g) + {ups} h f = 2 × {h} × {head_dim} × ({heads} + {model.num_kv_heads}) + "
        f"{ups} × {h} × {model.ffn}{experts} = {matrices:,}"
    )
    yield (
        "model FLOPs per token = 3 × (L × (2 × matrices + 4 s a d) + 2 h V) = "
        f"3 × ({model.num_layers} × (2 × {matrices} + 4 × {job.seq_len} × {heads} × {head_dim}) + "
        f"2 × {h} × {model.vocab}) = {flops / 1e9:,.4g} GFLOP"
    )
    yield (
        f"micro-batches m = global batch / (data × micro-batch) = {job.global_batch} / ({layout.data} × "
        f"{layout.micro_batch}) = {layout.num_micro_batches(job.global_batch)}"
    )
    yield (
        f"tokens/s = global batch × s / step = {job.global_batch} × {job.seq_len} / {step_s:.4g} s = "
        f"{job.tokens_per_step / step_s:,.0f}"
    )
    peak, total = peak_flops(plan.cluster.device, job.precision), flops * job.tokens_per_step
    yield (
        f"MFU = model FLOPs per step / (step × devices × peak) = {total:.3e} / "
        f"({step_s:.4g} s × {layout.num_ranks} × {format_flops_per_s(peak)}) = "
        f"{total / (step_s * layout.num_ranks * peak):.1%}"
    )
    run_s = step_s * job.num_steps
    yield (
        f"device-hours = steps × step × devices / 3600 = {job.num_steps} × {step_s:.4g} s × {layout.num_ranks} / 3600"
        f" = {run_s * layout.num_ranks / 3600:,.3f}, in {format_seconds(run_s)}"
    )


def _states(plan: Plan, runner: Engine) -> str:
    """Model states of the first pipeline rank, as N × (parameter + gradient + optimizer)."""
    assert plan.prediction is not None
    layout, held = plan.layout, plan.prediction.memory_bytes[0]
    size, shards = runner.states_for(plan.job.precision).parameter, layout.num_shards * layout.context
    stages = {"parameters": 3, "gradients": 2, "optimizer": 1}
    cuts = {kind: shards if layout.zero >= stage else 1 for kind, stage in stages.items()}
    elements, total = held["parameters"] * cuts["parameters"] / size, sum(held[kind] for kind in stages)
    parts = (f"{held[kind] * cut / elements:.3g}" + (f" / {cut}" if cut > 1 else "") for kind, cut in cuts.items())
    return (
        f"model states of pipeline rank 0 = N (parameter + gradient + optimizer), cut as ZeRO {layout.zero} does = "
        f"{elements:,.0f} × ({' + '.join(parts)}) bytes = {format_bytes(total)}"
    )


def _activations(plan: Plan, runner: Engine, footprint: Footprint) -> str:
    """Of the first pipeline rank: what its fullest chunk keeps per micro-batch, as often as the schedule holds it."""
    assert plan.prediction is not None
    layout, job = plan.layout, plan.job
    cut = cut_of(plan.model, job.seq_len, layout, ELEMENT_BYTES[job.precision], eight_bit=str(job.precision) == "fp8")
    block = operations.layer(plan.model, cut, runner.kernels)
    kept, working = (float(part[0]) for part in memory.kept_bytes(block, cut, of([layout]).recompute))
    plain = float(block.kept_bytes)
    chunks = [
        (int(n), int(again)) for n, again in zip(footprint.layers[:, 0], footprint.repeated[0][:, 0], strict=True)
    ]
    layers, again = max(chunks, key=lambda chunk: chunk[1] * kept + (chunk[0] - chunk[1]) * plain)
    whole = f" + {layers - again} × {format_bytes(plain)}" if again < layers and layout.recompute != "none" else ""
    held = memory.in_flight(
        layout.schedule, layout.pipeline, layout.virtual_stages, of([layout]).num_micro_batches(job.global_batch)
    )
    number = layers if not whole else again
    room = working and footprint.closing[0][:, 0].any()
    working_set = f" + {format_bytes(working)} while a layer is computed again" if room else ""
    return (
        f"activations of pipeline rank 0 = micro-batches held × layers of a chunk × kept per layer = {held[0][0]} × "
        f"({number} × {format_bytes(kept)}{whole}){working_set} = "
        f"{format_bytes(plan.prediction.memory_bytes[0]['activations'])}"
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
        f"one {message.operation} of {message.purpose} = {rounds} (n - 1) / n × M / bus bandwidth = {rounds} × "
        f"({row.num_ranks} - 1) / {row.num_ranks} × {format_bytes(size)} / {moved / each / 1e9:,.3g} GB/s "
        f"= {format_seconds(each)}, latency included"
    )
