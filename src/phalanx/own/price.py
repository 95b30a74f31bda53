"""What a layout of a recorded module (own.record) costs: seconds of a step, and bytes of the fullest stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.own.blocks import Section, sections
from phalanx.own.record import Recorded
from phalanx.plan.layout import Layout
from phalanx.planner.compute import optimizer_s, total_s
from phalanx.planner.engine import OURS, States, engine
from phalanx.planner.network import Placement, collective_s, placements, point_to_point_s
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePrediction:
    """A layout for a module: seconds of a step by kind, and bytes by kind on the stage that needs most."""

    layout: Layout
    step_s_by_kind: Mapping[str, float]
    memory_bytes: Mapping[str, int]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.step_s_by_kind.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One stage's parts, the blocks among them, and what they come to for a micro-batch."""

    parts: Sequence[Recorded]
    blocks: Sequence[Recorded]

    def total(self, key: str) -> int:
        """The sum of a field of Recorded over the parts."""
        return sum(getattr(part, key) for part in self.parts)


def price(layout: Layout, parts: Sequence[Recorded], job: JobSpec, cluster: ClusterSpec) -> ModulePrediction:
    """Predict `layout` for a module of these `parts`, recorded for its tensor axis and micro-batch.

    The schedule is priced as 1F1B: its slowest stage m times, the others once (Megatron-LM, arXiv 2104.04473, section
    2.2).
    """
    stages, places = _stages(layout, parts), placements(cluster, layout)
    count = layout.num_micro_batches(job.global_batch)
    runner, full = engine(OURS), layout.recompute == "full"

    def compute_s(operations: Sequence[Recorded], *, backward: bool) -> float:
        every = [each for part in operations for each in (part.backward if backward else part.forward)]
        return float(total_s(every, cluster.device, job.precision, runner, backward=backward))

    work = [compute_s(each.parts, backward=False) + compute_s(each.parts, backward=True) for each in stages]
    repeated = [compute_s(each.blocks, backward=False) if full else 0.0 for each in stages]
    tensor = [_tensor_s(each, cluster, places["tensor"], repeats=full) for each in stages]
    busy = [sum(each) for each in zip(work, repeated, tensor, strict=True)]
    slowest = max(range(len(stages)), key=busy.__getitem__)
    message = max((part.output_bytes for part in parts[:-1]), default=0)
    hops_s = 2 * float(point_to_point_s(cluster, message, places["pipeline"])) * (len(stages) - 1)
    trained = max(each.total("num_trained") for each in stages)
    states = runner.states_for(job.precision)
    parameter_bytes, gradient_bytes = trained * min(2.0, states.parameter), trained * runner.reduce_bytes
    seconds = {
        "compute": count * work[slowest],
        "recompute": count * repeated[slowest],
        "tensor": count * tensor[slowest],
        "pipeline": sum(busy) - busy[slowest] + hops_s,
        "data": _data_s(layout, cluster, places["data"], count, parameter_bytes, gradient_bytes),
        "optimizer": float(optimizer_s(trained / (layout.num_shards if layout.zero else 1), runner, cluster.device)),
    }
    needed = [_memory(layout, number, stage, count, states) for number, stage in enumerate(stages)]
    return ModulePrediction(
        layout=layout, step_s_by_kind=seconds, memory_bytes=max(needed, key=lambda each: sum(each.values()))
    )


def _stages(layout: Layout, parts: Sequence[Recorded]) -> list[_Stage]:
    if len(parts) == 1:
        return [_Stage(parts=parts, blocks=())]
    before, *blocks, after = parts

    def stage(section: Section) -> _Stage:
        inside = [blocks[layer] for layer in section.layers]
        first, last = [before] if section.first else [], [after] if section.last else []
        return _Stage(parts=[*first, *inside, *last], blocks=inside)

    return [stage(section) for section in sections(len(blocks), layout)]


def _tensor_s(stage: _Stage, cluster: ClusterSpec, place: Placement, *, repeats: bool) -> float:
    """Messages of the tensor axis; of blocks that run again, those of forward, half of all, once more."""
    each = [(1.0, message) for part in stage.parts for message in part.messages]
    if repeats:
        each += [(0.5, message) for part in stage.blocks for message in part.messages]
    return sum(
        share * times * float(collective_s(cluster, operation, size / times, place))
        for share, (operation, times, size) in each
    )


def _data_s(
    layout: Layout, cluster: ClusterSpec, place: Placement, count: int, parameter_bytes: float, gradient_bytes: float
) -> float:
    """Messages of the data axis in one step of `count` micro-batches, by ZeRO stage."""
    if layout.data == 1:
        return 0.0

    def message_s(operation: str, size: float) -> float:
        return float(collective_s(cluster, operation, size, place))

    gather, scatter = message_s("all_gather", parameter_bytes), message_s("reduce_scatter", gradient_bytes)
    match layout.zero:
        case 0:
            return message_s("all_reduce", gradient_bytes)
        case 1:
            return scatter + gather
        case 2:
            return count * scatter + gather
    return count * (scatter + 2 * gather)


def _memory(layout: Layout, number: int, stage: _Stage, count: int, states: States) -> dict[str, int]:
    zero, shards = layout.zero, layout.num_shards
    in_flight = min(count, layout.pipeline - number)
    largest = max((part.kept_bytes for part in stage.blocks), default=0)
    kept = stage.total("kept_bytes")
    if layout.recompute == "full":
        kept += sum(part.output_bytes - part.kept_bytes for part in stage.blocks)
    whole = max((part.num_elements for part in stage.parts), default=0) if zero == 3 else 0
    trained = stage.total("num_trained")
    return {
        "parameters": int(states.parameter * (stage.total("num_elements") / (shards if zero == 3 else 1) + whole)),
        "gradients": int(states.gradient * trained / (shards if zero >= 2 else 1)),
        "optimizer": int(states.optimizer * trained / (shards if zero else 1)),
        "activations": in_flight * kept + largest,
    }
