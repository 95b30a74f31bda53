"""Traffic: every message that one rank takes part in during one optimizer step, down to the smallest.

This is a claim, made from sizes alone; the fact is what the trainer's Comms count. A test demands that both be equal
for every layout of up to 8 ranks. Bytes are payloads as `plan.comm.Comm` defines them, counts those of
docs/equations.md, 17 to 20.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.plan.comm import Operation
from phalanx.plan.groups import head_copies_embedding, kv_copies
from phalanx.plan.layout import Coord
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import Schedule, forward_only, schedule
from phalanx.plan.shards import Buffer, Copies, rank_stages, stage_buffers
from phalanx.plan.stage_traffic import ACCUMULATION_BYTES, COMPUTE_BYTES, Message, StageTraffic
from phalanx.plan.stages import Stage, recomputed_layers

HEAD_ROWS = 1024
"""Rows of logits that exist at a time, for full logits are often the largest tensor of a run."""

NUM_STATISTICS = 8
"""Float64 numbers in the control message of a step: loss, squared norm, votes to stop, and five sums of seconds."""

NUM_VALIDATION_STATISTICS = 3
"""Float64 numbers in the message of a round of validation: summed loss, supervised tokens, votes to stop."""


def traffic(plan: Plan, coord: Coord) -> tuple[Message, ...]:
    """All messages of one training step of the rank at `coord`; groups of one rank send none. What comes every so many
    steps (checkpoints, checks of copies) is not among them."""
    return tuple(message for message in _Traffic(plan, coord).messages() if message.count)


def validation_traffic(plan: Plan, coord: Coord) -> tuple[Message, ...]:
    """All messages of one round of validation (as many sequences as one step has) of the rank at `coord`."""
    return tuple(message for message in _Traffic(plan, coord, validates=True).messages() if message.count)


class _Traffic:
    """The messages of a step or, with `validates`, of a round of validation: its forwards alone."""

    def __init__(self, plan: Plan, coord: Coord, *, validates: bool = False) -> None:
        self.plan, self.coord, self.validates = plan, coord, validates
        model, job, layout = plan.model, plan.job, plan.layout
        self.compute_bytes = COMPUTE_BYTES[job.precision]
        self.wide_bytes = ACCUMULATION_BYTES[job.precision]
        self.num_micro_batches = layout.num_micro_batches(job.global_batch)
        self.num_tokens = layout.micro_batch * job.seq_len
        self.cuts_tokens = layout.sequence_parallel and layout.tensor > 1
        self.stages = rank_stages(model, layout, coord, job.seq_len)
        self.buffers = [stage_buffers(model, layout, coord, stage) for stage in self.stages]
        order = schedule(layout.schedule, layout.pipeline, layout.virtual_stages, self.num_micro_batches)
        self.schedule: Schedule = forward_only(order) if validates else order
        self.common = StageTraffic(
            layout=layout, coord=coord, precision=job.precision, schedule=self.schedule, buffers=self.buffers
        )

    def messages(self) -> Iterator[Message]:
        layout = self.plan.layout
        if layout.tensor > 1:
            for stage in self.stages:
                yield from self._tensor(stage)
        held = self.num_tokens // layout.tensor if self.cuts_tokens else self.num_tokens
        yield from self.common.pipeline(held * self.plan.model.hidden * self.compute_bytes)
        if layout.data > 1 and layout.zero >= 3:
            yield from self._gathers()
        if self.validates:
            yield from self._numbers("validation loss", NUM_VALIDATION_STATISTICS)
            return
        if layout.tensor > 1:
            yield from self._copies("tensor", "tensor", "replicated gradients", when=self.cuts_tokens)
            yield from self._copies("heads", "tensor", "head norm gradients", when=True)
            yield from self._copies("kv", "kv", "kv copy gradients", when=kv_copies(self.plan.model, layout.tensor) > 1)
        yield from self._tied()
        if layout.data > 1:
            yield from self.common.data()
        yield from self._numbers("loss and norm", NUM_STATISTICS)

    def _numbers(self, purpose: str, count: int) -> Iterator[Message]:
        """A few float64 numbers, summed over all ranks."""
        if self.plan.layout.num_ranks > 1:
            yield Message(group="world", purpose=purpose, operation="all_reduce", count=1, payload_bytes=count * 8)

    def _tensor(self, stage: Stage) -> Iterator[Message]:
        """Two half-blocks per layer, each opened and closed once forward and once backward, in chunks; and both ends of
        the model."""
        chunks, recompute = self.plan.layout.tensor_overlap_chunks, self.plan.layout.recompute
        again = 0 if self.validates else len(recomputed_layers(self.plan.layout, stage))
        forwards = len(stage.layers) + again * (recompute == "full")
        reopened = again * (recompute == "selective")  # at once

        def back(times: int, messages: int) -> tuple[int, int]:
            return (0, 0) if self.validates else (times, messages)

        for half_block in ("attention", "mlp"):
            count = len(stage.layers)
            yield from self._opened(f"{half_block} input", forwards + reopened, forwards * chunks + reopened)
            yield from self._closed(f"{half_block} output", forwards, forwards * chunks)
            yield from self._opened(f"{half_block} output gradient", *back(count, count * chunks))
            yield from self._closed(f"{half_block} input gradient", *back(count, count * chunks))
        if stage.embedding:
            yield from self._closed("embedding output", 1, 1)
            yield from self._opened("embedding output gradient", *back(1, 1))
        if stage.head:
            yield from self._opened("head input", 1, 1)
            chunks = -(-self.num_tokens // HEAD_ROWS) * self.num_micro_batches
            # From every tensor rank, per token: the log of its sum of exponentials and its target logit.
            size = self.plan.layout.tensor * 2 * self.num_tokens * self.num_micro_batches * self.wide_bytes
            yield Message(group="tensor", purpose="loss", operation="all_gather", count=chunks, payload_bytes=size)
            yield from self._closed("head input gradient", *back(1, 1))

    def _opened(self, purpose: str, times: int, messages: int) -> Iterator[Message]:
        """Tokens that were cut are gathered: only under sequence parallelism. So often per micro-batch, in so many
        messages."""
        if self.cuts_tokens:
            yield self._activations(purpose, "all_gather", times, messages)

    def _closed(self, purpose: str, times: int, messages: int) -> Iterator[Message]:
        """Partial sums become whole."""
        yield self._activations(purpose, "reduce_scatter" if self.cuts_tokens else "all_reduce", times, messages)

    def _activations(self, purpose: str, operation: Operation, times: int, messages: int) -> Message:
        size = times * self.num_micro_batches * self.num_tokens * self.plan.model.hidden * self.compute_bytes
        count = messages * self.num_micro_batches
        return Message(group="tensor", purpose=purpose, operation=operation, count=count, payload_bytes=size)

    def _copies(self, copies: Copies, group: str, purpose: str, *, when: bool) -> Iterator[Message]:
        size = self._slice_elements(copies) * self.wide_bytes
        if when and size:
            yield Message(group=group, purpose=purpose, operation="all_reduce", count=1, payload_bytes=size)

    def _slice_elements(self, copies: Copies) -> int:
        """Elements that this rank updates of all parts held in `copies`."""
        parts = [part for chunk in self.buffers for buffer in chunk for part in buffer.parts if part.copies == copies]
        return sum(part.stop - part.start for part in parts) // self.plan.layout.num_shards

    def _tied(self) -> Iterator[Message]:
        """Both holders of a tied embedding add their gradients; their parts have equal sizes."""
        if not head_copies_embedding(self.plan.model, self.plan.layout):
            return
        holds_copy = self._slice_elements("tied")
        first = [buffer for chunk in self.buffers for buffer in chunk if buffer.name == "embedding"]
        size = holds_copy or sum(
            (part.stop - part.start) // self.plan.layout.num_shards
            for buffer in first
            for part in buffer.parts
            if part.copies == "none"
        )
        if size:
            size *= self.wide_bytes
            yield Message(group="tied", purpose="tied gradients", operation="all_reduce", count=1, payload_bytes=size)

    def _gathers(self) -> Iterator[Message]:
        """ZeRO 3 makes buffers whole: a layer's for its forward and again for its backward; the embedding's for its
        forward; the head's for the time from a forward to its backward (in validation, for its forward), and with it
        the embedding's where a tied head shares it on this rank."""
        count, elements, holders = 0, 0, dict.fromkeys(range(len(self.stages)), 0)
        shared = self._shared_embedding()
        for action in self.schedule.actions[self.coord.pipeline]:
            forward = action.kind == "forward"
            for buffer in self.buffers[action.chunk]:
                if buffer.name == "head":
                    was, change = holders[action.chunk], (1 if forward else -1)
                    holders[action.chunk] += 0 if self.validates else change
                    needed = [buffer, *shared] if forward and not was else []
                elif buffer.name == "embedding":
                    needed = [buffer] if forward and not (shared and any(holders.values())) else []
                else:
                    needed = [buffer]
                count += len(needed)
                elements += sum(each.num_elements for each in needed)
        if self.plan.layout.num_shards > 1:
            yield self.common.parameters(count, elements)

    def _shared_embedding(self) -> list[Buffer]:
        """The embedding's buffer, if a tied head on this rank uses it."""
        buffers = {buffer.name: buffer for chunk in self.buffers for buffer in chunk}
        both = self.plan.model.tied and {"embedding", "head"} <= buffers.keys()
        return [buffers["embedding"]] if both else []
