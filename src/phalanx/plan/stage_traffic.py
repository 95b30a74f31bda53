"""Messages of a stage that do not depend on what its blocks are: along the pipeline and over the data axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.comm import Operation
from phalanx.plan.groups import data_groups
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.reduction import NARROW, WITH_ERRORS, factor_elements, num_largest
from phalanx.plan.schedule import FORWARD_CHANNEL, Schedule, Transfer
from phalanx.plan.shards import Buffer
from phalanx.spec.job import Precision

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
ACCUMULATION_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`count` calls of one operation on one group for one purpose, `payload_bytes` together."""

    group: str
    purpose: str
    operation: Operation
    count: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """What the rank at `coord` sends whose chunks hold `buffers`, in one step of `schedule`."""

    layout: Layout
    coord: Coord
    precision: Precision
    schedule: Schedule
    buffers: Sequence[Sequence[Buffer]]

    def pipeline(self, size: int) -> Iterator[Message]:
        """Activations and their gradients between stages, `size` bytes each."""
        counts: dict[tuple[str, Operation], int] = {}
        for action in self.schedule.actions[self.coord.pipeline]:
            gives = self.schedule.gives(self.coord.pipeline, action)
            needs = self.schedule.needs(self.coord.pipeline, action)
            sides: tuple[tuple[Operation, Transfer | None], ...] = (("send", gives), ("recv", needs))
            for operation, transfer in sides:
                if transfer is not None and not transfer.local:
                    purpose = "activations" if transfer.channel == FORWARD_CHANNEL else "activation gradients"
                    counts[purpose, operation] = counts.get((purpose, operation), 0) + 1
        for (purpose, operation), count in counts.items():
            payload_bytes = count * size if operation == "send" else 0
            yield Message(
                group="pipeline", purpose=purpose, operation=operation, count=count, payload_bytes=payload_bytes
            )

    def data(self) -> Iterator[Message]:
        """Gradients: in buckets as backward completes them, or under ZeRO 2 block by block after every backward. They
        are summed among the ranks that share one whole, then each shard among those that hold it. New parameters: once
        under ZeRO 1 and 2, block by block where that overlaps the next forward; `_gathers` has those of ZeRO 3."""
        layout = self.layout
        zero, (shards, replicas) = (layout.zero if layout.num_shards > 1 else 0), data_groups(layout)
        buckets = self._buckets()
        if not buckets:
            return
        elements = sum(buffer.num_elements for bucket in buckets for buffer in bucket)
        if layout.reduce in WITH_ERRORS:
            yield from self._parts_of_gradients(buckets)
        else:
            count = sum(map(len, buckets)) if zero >= 2 else len(buckets)
            repeats = self.schedule.num_micro_batches if zero >= 2 else 1
            if layout.num_shards > 1:
                yield from self._gradients(shards, "reduce_scatter", count * repeats, elements * repeats)
            if layout.num_shards < layout.data:
                yield from self._gradients(replicas, "all_reduce", count, elements // layout.num_shards)
        if zero in (1, 2):
            yield self.parameters(sum(map(len, buckets)) if layout.overlap else 1, elements)

    def _gradients(self, group: str, operation: Operation, count: int, elements: int) -> Iterator[Message]:
        """Whole gradients, in the dtype of the way; for fp16 the largest of each message is agreed on before."""
        reduce = self.layout.reduce
        size = elements * (2 if reduce in NARROW else ACCUMULATION_BYTES[self.precision])
        yield Message(group=group, purpose="gradients", operation=operation, count=count, payload_bytes=size)
        if reduce == "fp16":
            size = count * ACCUMULATION_BYTES[self.precision]
            yield Message(
                group=group, purpose="gradient scale", operation="all_reduce", count=count, payload_bytes=size
            )

    def _parts_of_gradients(self, buckets: Sequence[Sequence[Buffer]]) -> Iterator[Message]:
        """PowerSGD: left factors and what is no matrix, then right factors. Top-k: values and places."""
        layout = self.layout
        operation: Operation = "all_gather" if layout.reduce == "top-k" else "all_reduce"
        for bucket in buckets:
            if layout.reduce == "top-k":
                sent = [2 * layout.data * sum(num_largest(buffer, layout.reduce_fraction) for buffer in bucket)]
            else:
                sent = [
                    sum(each) for each in zip(*(factor_elements(b, layout.reduce_rank) for b in bucket), strict=True)
                ]
            count, size = sum(map(bool, sent)), sum(sent) * ACCUMULATION_BYTES[self.precision]
            yield Message(group="data", purpose="gradients", operation=operation, count=count, payload_bytes=size)

    def parameters(self, count: int, elements: int) -> Message:
        """Shards of parameters that become whole, of so many elements together."""
        shards, size = data_groups(self.layout)[0], elements * COMPUTE_BYTES[self.precision]
        return Message(group=shards, purpose="parameters", operation="all_gather", count=count, payload_bytes=size)

    def _buckets(self) -> list[list[Buffer]]:
        """Buffers as their gradients become final, in buckets of at least `bucket_bytes` each, but for the last one."""
        buckets: list[list[Buffer]] = [[]]
        for buffer in self._completed():
            if (
                sum(member.num_elements for member in buckets[-1]) * ACCUMULATION_BYTES[self.precision]
                >= self.layout.bucket_bytes
            ):
                buckets.append([])
            buckets[-1].append(buffer)
        return [bucket for bucket in buckets if bucket]

    def _completed(self) -> Iterator[Buffer]:
        """Buffers in the order in which their gradients become final: chunk by chunk as the schedule finishes them,
        within a chunk from the last block to the first."""
        last = self.schedule.last_to_add(self.coord.pipeline)
        actions = self.schedule.actions[self.coord.pipeline]
        for chunk in sorted(last, key=lambda chunk: actions.index(last[chunk])):
            yield from reversed(self.buffers[chunk])
