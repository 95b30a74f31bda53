"""Messages: every message of one step of the first rank, and of one layer, with the link that it crosses and seconds.

For this trainer they are those of `plan.traffic`, which are held against what it sends. For other engines, and for what
it does not run (experts, the context axis), they are made here from the same sizes that the planner prices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.plan.comm import Operation
from phalanx.plan.cut import cut_of, expert_spread
from phalanx.plan.groups import AXIS_OF, data_groups
from phalanx.plan.layout import AXES, Coord
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import schedule
from phalanx.plan.stage_traffic import Message, StageTraffic
from phalanx.plan.traffic import NUM_STATISTICS, traffic
from phalanx.planner import memory, network
from phalanx.planner.candidates import of
from phalanx.planner.costs import ELEMENT_BYTES
from phalanx.planner.engine import OURS, Engine, engine
from phalanx.planner.estimate import footprints


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A message, how many ranks take part, the link it crosses, and the seconds of all its calls, nothing hidden."""

    message: Message
    num_ranks: int
    link: str
    seconds: float


def of_step(plan: Plan, engine_name: str = OURS) -> tuple[Priced, ...]:
    """All messages of one step of the first rank."""
    if engine_name == OURS and not plan.model.num_experts and plan.layout.context == 1:
        found: Iterator[Message] = iter(traffic(plan, Coord()))
    else:
        found = Claimed(plan, engine(engine_name)).step()
    return tuple(priced(plan, message) for message in found)


def of_layer(plan: Plan, engine_name: str = OURS) -> tuple[Priced, ...]:
    """The messages of one layer, forward and backward of one micro-batch; computed again, if any layer is. Gradients
    that are summed once in a step are not among them."""
    return tuple(priced(plan, message) for message in Claimed(plan, engine(engine_name)).layer(again=True))


def priced(plan: Plan, message: Message, order: tuple[str, ...] = ()) -> Priced:
    """`message` with the link that its group crosses and its seconds, were ranks numbered with axes in this `order`,
    slowest first, instead of in the layout's own."""
    place = placed(plan, message.group, order or plan.layout.order)
    link = plan.cluster.intra_node if bool(np.asarray(place.nodes) <= 1) else plan.cluster.inter_node
    if not message.payload_bytes:  # the receiving side of what its sender counts
        return Priced(message=message, num_ranks=int(place.size), link=link.name, seconds=0.0)
    each = message.payload_bytes / message.count
    if message.operation in ("send", "recv"):
        seconds = network.point_to_point_s(plan.cluster, each, place)
    elif message.operation == "all_to_all":
        seconds = network.all_to_all_s(plan.cluster, each, place)
    else:
        seconds = network.collective_s(plan.cluster, message.operation, each, place)
    total_s = float(seconds) * message.count
    return Priced(message=message, num_ranks=int(place.size), link=link.name, seconds=total_s)


def by_order(plan: Plan, engine_name: str = OURS) -> dict[tuple[str, ...], float]:
    """Seconds of all messages of one step, nothing hidden, for each order of the axes that have several ranks, slowest
    first; that in which ranks are numbered comes first. Empty where it makes no difference, and for a context axis."""
    layout = plan.layout
    axes = [axis for axis in layout.order if getattr(layout, axis) > 1]
    if len(axes) < 2 or layout.context > 1 or layout.num_ranks <= plan.cluster.devices_per_node:
        return {}
    messages = [row.message for row in of_step(plan, engine_name)]
    return {
        order: sum(priced(plan, message, order).seconds for message in messages)
        for order in itertools.permutations(axes)
    }


def placed(plan: Plan, group: str, order: tuple[str, ...]) -> network.Placement:
    """Where the members of the named group sit."""
    cluster, layout, spread = plan.cluster, plan.layout, int(expert_spread(plan.model, plan.layout))
    stride = dict.fromkeys(AXES, 1)
    for faster, axis in itertools.combinations(reversed(order), 2):
        stride[axis] *= getattr(layout, faster)
    axis = AXIS_OF.get(group, group)
    if axis in ("data", "experts", "expert copies"):
        return _on_data(plan, group, spread, stride)
    if axis in AXES:
        return network.placement(cluster, getattr(layout, axis), stride[axis])
    return network.placement(cluster, layout.num_ranks, 1)


def _on_data(plan: Plan, group: str, spread: int, strides: dict[str, int]) -> network.Placement:
    """A group on the data axis, where neighbours on an axis are `strides` apart. What is summed over it goes over the
    context axis too, which lies inside it."""
    layout, context, stride = plan.layout, plan.layout.context, strides["data"]
    size, copies = (spread, layout.data // spread) if "expert" in group else (layout.num_shards, 0)
    if group == "experts":
        return network.placement(plan.cluster, size, stride)
    if group == "expert copies":
        return network.placement(plan.cluster, copies * context, stride * size // context)
    if group == "replicas":
        return network.placement(plan.cluster, layout.data // size, stride * size)
    whole = network.placement(plan.cluster, layout.data if group == "data" else size, stride)
    beside = network.placement(plan.cluster, context, strides["context"])
    return network.with_context(plan.cluster, whole, beside, layout.tensor)


class Claimed:
    """Messages from sizes alone, as the planner prices them."""

    def __init__(self, plan: Plan, runner: Engine) -> None:
        self.plan, self.runner, self.layout = plan, runner, plan.layout
        model, job, layout = plan.model, plan.job, plan.layout
        self.cut = cut_of(model, job.seq_len, layout, ELEMENT_BYTES[job.precision])
        self.micro_batches = layout.num_micro_batches(job.global_batch)
        self.cuts_tokens = layout.sequence_parallel and layout.tensor > 1
        (self.footprint,) = footprints(model, job, plan.cluster, runner, of([layout]))
        self.spread = int(expert_spread(model, layout))
        self.states = runner.states_for(job.precision)

    def step(self) -> Iterator[Message]:
        """All of one step."""
        layers = int(self.footprint.layers[:, 0].sum())
        repeated = int(self.footprint.repeated[0, :, 0].sum()) if self.layout.recompute != "none" else 0
        sums: dict[tuple[str, str, Operation], tuple[int, int]] = {}
        for again, times in ((False, layers - repeated), (True, repeated)):
            for message in self.layer(again=again) if times else ():
                key = (message.group, message.purpose, message.operation)
                count, size = sums.get(key, (0, 0))
                times_here = times * self.micro_batches
                sums[key] = count + times_here * message.count, size + times_here * message.payload_bytes
        for (group, purpose, operation), (count, size) in sums.items():
            yield _message(group, purpose, operation, count, size)
        yield from self._ends()
        yield from self._pipeline()
        yield from self._data()
        if self.layout.num_ranks > 1:
            yield _message("world", "loss and norm", "all_reduce", 1, 8 * NUM_STATISTICS)

    def layer(self, *, again: bool) -> Iterator[Message]:
        """Of one layer and micro-batch; `again`: of one that is recomputed as the layout says."""
        full = again and self.layout.recompute == "full"
        if self.layout.tensor > 1:
            yield from self._half_blocks(again=again, full=full)
        if self.layout.context > 1:
            size, rounds = 2 * self.cut.tokens * self.cut.kv * self.cut.element, self.layout.context - 1
            for purpose, times in (("keys and values", 1 + full), ("keys and values, gradients", 2)):
                yield _message("context", purpose, "send", times * rounds, times * rounds * size)
        if self.plan.model.num_experts and self.spread > 1:
            size = self.cut.routed_tokens * self.cut.hidden * self.cut.element
            size //= self.layout.tensor if self.cuts_tokens else 1
            for purpose, times in (("tokens of experts", 2 * (1 + full)), ("token gradients of experts", 2)):
                yield _message("experts", purpose, "all_to_all", times, times * size)
        if self.layout.zero >= 3 and self.layout.num_shards * self.layout.context > 1:
            elements, group = float(memory.elements(self.plan.model, self.layout).layer), data_groups(self.layout)[0]
            gathered = elements * min(2.0, self.states.parameter)
            yield _message(group, "parameters", "all_gather", 2, 2 * gathered)
            yield _message(group, "gradients", "reduce_scatter", 1, elements * self.runner.reduce_bytes)

    def _half_blocks(self, *, again: bool, full: bool) -> Iterator[Message]:
        """Each is opened and closed forward and backward; inputs that were not kept are gathered again."""
        kernels = self.runner.kernels
        cheap = again and self.layout.recompute == "selective" and kernels.selective == "cheap"
        reopened = 1.0 if cheap else 1.0 - kernels.keep_gathered
        for half in ("attention", "mlp"):
            yield from self._opened(f"{half} input", 1 + full + reopened)
            yield from self._closed(f"{half} output", 1 + full)
            yield from self._opened(f"{half} output gradient", 1)
            yield from self._closed(f"{half} input gradient", 1)

    def _opened(self, purpose: str, times: float) -> Iterator[Message]:
        """Tokens that were cut are gathered: only under sequence parallelism. `times` may be an average."""
        if self.cuts_tokens:
            size = times * self.cut.tokens * self.cut.hidden * self.cut.element
            yield _message("tensor", purpose, "all_gather", math.ceil(times), size)

    def _closed(self, purpose: str, times: int) -> Iterator[Message]:
        """Partial sums become whole."""
        size = times * self.cut.tokens * self.cut.hidden * self.cut.element
        yield _message("tensor", purpose, "reduce_scatter" if self.cuts_tokens else "all_reduce", times, size)

    def _ends(self) -> Iterator[Message]:
        """Of the embedding, and of the head where this rank holds it too."""
        if self.layout.tensor == 1:
            return
        places, times = self.footprint.places, self.micro_batches
        yield from self._closed("embedding output", times)
        yield from self._opened("embedding output gradient", times)
        if (places[:, 0] == places.max()).any():
            yield from self._opened("head input", times)
            size = 3 * times * self.cut.tokens * self.cut.statistic
            yield _message("tensor", "loss", "all_reduce", 3 * times, size)
            yield from self._closed("head input gradient", times)

    def _pipeline(self) -> Iterator[Message]:
        layout = self.layout
        order = schedule(layout.schedule, layout.pipeline, layout.virtual_stages, self.micro_batches)
        sent = StageTraffic(layout=layout, coord=Coord(), precision="bf16", schedule=order, buffers=())
        size = self.cut.rows * self.cut.hidden * self.cut.element
        parts = layout.tensor if self.runner.scatter_boundary and not self.cuts_tokens else 1
        for message in sent.pipeline(size // parts):
            yield message
            if parts > 1 and message.operation == "recv":
                yield _message("tensor", message.purpose, "all_gather", message.count, message.count * size)

    def _data(self) -> Iterator[Message]:
        """Once in a step: gradients and new parameters, of which `layer` has those of ZeRO 3 already."""
        layout, held, runner = self.layout, self.footprint.held, self.runner
        shards, replicas = data_groups(layout)
        own, experts = float(held.elements[0, 0] - held.experts[0, 0]), float(held.experts[0, 0])
        reduced = own * runner.reduce_bytes
        buckets = max(1, math.ceil(reduced / layout.bucket_bytes))
        pieces = int(self.footprint.layers[:, 0].sum()) * runner.shard_messages or buckets
        rounds = self.micro_batches if layout.zero == 2 else 1
        cut = layout.num_shards * layout.context > 1
        if not layout.zero and layout.data * layout.context > 1:
            yield _message("data", "gradients", "all_reduce", buckets, reduced)
        if layout.zero in (1, 2) and cut:
            yield _message(shards, "gradients", "reduce_scatter", rounds * pieces, rounds * reduced)
            yield _message(shards, "parameters", "all_gather", pieces, own * min(self.states.parameter, 4.0))
        if layout.zero and layout.num_shards < layout.data:
            yield _message(replicas, "gradients", "all_reduce", buckets, reduced / layout.num_shards)
        if experts and layout.data // self.spread * layout.context > 1:
            size = experts * runner.reduce_bytes * (rounds + 1) / 2
            yield _message("expert copies", "gradients of experts", "all_reduce", 1, size)
        if tied := float(self.footprint.tied[0, 0]):
            size = tied * runner.reduce_bytes / (layout.num_shards * layout.context if runner.tied_shards else 1)
            yield _message("tied", "tied gradients", "all_reduce", 1, size)


def _message(group: str, purpose: str, operation: Operation, count: int, payload_bytes: float) -> Message:
    return Message(group=group, purpose=purpose, operation=operation, count=count, payload_bytes=round(payload_bytes))
