"""Data parallelism over flat buffers: gradients are summed while backward still runs; ZeRO cuts what each data rank
keeps (Rajbhandari et al. 2020).

    ZeRO 0   gradients are all-reduced in buckets, once nothing more is added to them; every rank updates everything
    ZeRO 1   they are reduce-scattered instead; a rank updates its shards, then parameters are all-gathered, each
             block's while those before it run the next forward
    ZeRO 2   each block's gradients are reduce-scattered after every backward, added to a shard, and let go
    ZeRO 3   parameters too exist as shards only: a block's are gathered before it runs, the next block's meanwhile

One mechanism: each part of each buffer is cut evenly over the shard group, which is the data axis or neighbours on it,
and a stage tells what it is about to run. Gradients are reduce-scattered within that group, then each shard is
all-reduced among the ranks that hold the same one, its replicas; `reduction` says as what they travel. Without ZeRO a
shard is everything, and the data axis are its replicas; where ZeRO cuts over the whole axis, a shard has no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from phalanx.plan.comm import Comm, Work
from phalanx.plan.layout import Layout
from phalanx.plan.shards import Part, Piece, Rectangle
from phalanx.trainer.comm import DONE
from phalanx.trainer.flat import FlatBuffer
from phalanx.trainer.model import Block
from phalanx.trainer.reduction import Messages, lossy, wire


class Slice:
    """What this rank updates of one part: elements [start, stop) of the buffer.

    `parameters` (compute dtype) and `gradients` (accumulation dtype) are views of the buffer where that is whole, and
    tensors of their own where ZeRO keeps nothing but the shard.
    """

    def __init__(self, buffer: FlatBuffer, part: Part, start: int, stop: int, zero: int) -> None:
        self.buffer, self.part, self.start, self.stop = buffer, part, start, stop
        self.parameters: Tensor = buffer.parameters[start:stop]
        if zero >= 3:
            self.parameters = self.parameters.clone()
        whole = buffer.gradients
        self.gradients: Tensor = whole[start:stop] if zero < 2 else whole.new_zeros(stop - start)

    def rectangles(self) -> Iterator[tuple[Piece, Rectangle, slice]]:
        """Which rectangle of which parameter each stretch of this slice holds; padding is left out."""
        for piece in self.buffer.layout.pieces:
            for first, box in piece.rectangles(self.start, self.stop):
                yield piece, box, slice(first - self.start, first - self.start + box.num_elements)


class _Reduction:
    """The messages that sum the gradients of some buffers, one after another. `messages` yields each after which there
    is something to do and returns the last."""

    def __init__(self, buffers: Sequence[FlatBuffer], messages: Messages) -> None:
        self.buffers, self._messages, self.goes_on = buffers, messages, True
        self._proceed()

    @property
    def done(self) -> bool:
        """Whether nothing is under way or to come."""
        return not self.goes_on and self._work is DONE

    def advance(self) -> None:
        """Wait for the message under way, and send the next one or be complete."""
        self._work.wait()
        if self.goes_on:
            self._proceed()

    def finish(self) -> None:
        """Wait for all messages."""
        while self.goes_on:
            self.advance()
        self._work.wait()

    def _proceed(self) -> None:
        try:
            self._work = next(self._messages)
        except StopIteration as end:
            self._work, self.goes_on = end.value, False


class DataParallel:
    """The buffers of one rank, over the Comms of its shard group and of its replicas (`plan.groups.data_groups`)."""

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        shards: Comm,
        replicas: Comm,
        layout: Layout,
        seed: int,
        fill: Callable[[FlatBuffer], None],
    ) -> None:
        """`seed` is for what a reduction draws. `fill(buffer)` writes the initial parameters; one buffer at a time is
        whole if ZeRO 3 keeps shards only."""
        self.buffers, self.shards, self.replicas = tuple(buffers), shards, replicas
        self.bucket_bytes, self.overlap = layout.bucket_bytes, layout.overlap
        self.zero = layout.zero if shards.size > 1 else 0
        self._slices: dict[FlatBuffer, tuple[Slice, ...]] = {}
        for buffer in buffers:
            buffer.allocate_parameters()
            fill(buffer)
            if self.zero < 2:
                buffer.allocate_gradients()
            self._slices[buffer] = tuple(self._slice(buffer, part) for part in buffer.layout.parts)
            if self.zero == 3:
                buffer.free_parameters()
        self._wire = wire(layout)
        self.lossy = lossy(layout, buffers, shards if self.zero else replicas, seed)
        self._bucket: list[FlatBuffer] = []
        self._reductions: list[_Reduction] = []
        self._gathers: dict[FlatBuffer, Work] = {}
        self._holders = dict.fromkeys(self.buffers, 0)
        self._num_final = 0

    def _slice(self, buffer: FlatBuffer, part: Part) -> Slice:
        return Slice(buffer, part, *part.shard(self.shards.index, self.shards.size), self.zero)

    @property
    def first_replica(self) -> bool:
        """Whether this rank is the one that counts and writes, of all that hold the same shard."""
        return self.replicas.index == 0

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What this rank updates, all of it."""
        return tuple(part for buffer in self.buffers for part in self._slices[buffer])

    def zero_gradients(self) -> None:
        """Before the first action of a step."""
        for tensor in [part.gradients for part in self.slices] if self.zero >= 2 else self._whole_gradients():
            tensor.zero_()
        self._num_final = 0

    def _whole_gradients(self) -> list[Tensor]:
        return [buffer.gradients for buffer in self.buffers]

    def before_forward(self, block: Block, following: Block | None) -> None:
        """`block` runs next, then `following` (None: unknown)."""
        if block.backward_within_forward:
            self._allocate_gradients(block)
        self.before_validation(block, following)

    def before_validation(self, block: Block, following: Block | None) -> None:
        """`block` runs next, without a backward, then `following` (None: unknown)."""
        self._hold(block.reads)
        self._gather_ahead(following.reads if following else ())

    def after_validation(self, block: Block) -> None:
        """`block` has run, and nothing of it is needed any more."""
        self._release(block.reads)

    def after_forward(self, block: Block) -> None:
        """`block` has run. One that computes gradients on the way keeps its parameters until its backward is done."""
        if not block.backward_within_forward:
            self._release(block.reads)

    def before_backward(self, block: Block, following: Block | None) -> None:
        """The backward of `block` runs next, then that of `following` (None: unknown)."""
        self._allocate_gradients(block)
        self._hold(block.reads_in_backward)
        self._gather_ahead(following.reads_in_backward if following else ())

    def after_backward(self, block: Block, *, last: bool) -> None:
        """The backward of `block` has run; with `last`, nothing will be added to its gradients in this step."""
        self._release(block.reads if block.backward_within_forward else block.reads_in_backward)
        buffer = block.buffer
        self._num_final += last
        if self.zero >= 2:
            self._start_reduction([buffer], last=last)
        elif last:
            self._bucket.append(buffer)
            if sum(member.gradients.nbytes for member in self._bucket) >= self.bucket_bytes:
                self._start_bucket()

    def finish(self) -> None:
        """Reduce what is left and wait: after this, `slices` hold the gradients of the global batch."""
        assert self._num_final == len(self.buffers), f"{self._num_final} of {len(self.buffers)} buffers became final"
        if self._bucket:
            self._start_bucket()
        for reduction in self._reductions:
            reduction.finish()
        self._reductions.clear()

    def _start_bucket(self) -> None:
        """All data ranks run the same schedule, so they form the same buckets in the same order."""
        bucket, self._bucket = self._bucket, []
        self._start_reduction(bucket, last=True)

    def _start_reduction(self, bucket: Sequence[FlatBuffer], *, last: bool) -> None:
        """Those under way go on to what follows their first message: under ZeRO 2 at most two blocks' gradients are
        whole, one on its way while the next one is computed."""
        started = _Reduction(bucket, self._reduce(bucket, last))
        if not self.overlap:
            started.finish()
            return
        for reduction in self._reductions:
            if reduction.goes_on:
                reduction.advance()
        self._reductions = [*(reduction for reduction in self._reductions if not reduction.done), started]

    def _reduce(self, bucket: Sequence[FlatBuffer], last: bool) -> Messages:
        """Sum gradients over the shard group, into this rank's slices; with `last`, these over all replicas."""
        if self.lossy:
            return (yield from self.lossy.all_reduce(bucket))
        slices = [part for buffer in bucket for part in self._slices[buffer]]
        if self.zero:
            whole = [part.buffer.gradients[part.part.start : part.part.stop] for part in slices]
            mine = [part.buffer.gradients[part.start : part.stop] for part in slices]
            scattered = yield from self._wire.reduce_scatter(self.shards, whole, mine)
            if self.zero == 1 and self.replicas.size == 1:
                return scattered
            yield scattered
        if self.zero >= 2:
            for part, gradients in zip(slices, mine, strict=True):
                part.gradients.add_(gradients)
            for buffer in bucket:
                buffer.free_gradients()
        if not last:
            return DONE
        return (yield from self._wire.all_reduce(self.replicas, [part.gradients for part in slices]))

    def _allocate_gradients(self, block: Block) -> None:
        """Under ZeRO 2, whole gradients of `block` exist from here until they are reduced."""
        if self.zero < 2:
            return
        for reduction in self._reductions:
            while reduction.goes_on and any(buffer in reduction.buffers for buffer in block.reads):
                reduction.advance()  # fp16 agrees on a scale first: what was summed is safe after the second message
        for buffer in block.reads:
            buffer.allocate_gradients()

    def _hold(self, buffers: Sequence[FlatBuffer]) -> None:
        """Wait until parameters are whole; under ZeRO 3, make them so until `_release`."""
        for buffer in buffers:
            if self.zero == 3:
                self._start_gather(buffer)
                self._holders[buffer] += 1
            if buffer in self._gathers:
                self._gathers.pop(buffer).wait()

    def _release(self, buffers: Sequence[FlatBuffer]) -> None:
        if self.zero < 3:
            return
        for buffer in buffers:
            self._holders[buffer] -= 1
            if not self._holders[buffer]:
                buffer.free_parameters()

    def _gather_ahead(self, buffers: Sequence[FlatBuffer]) -> None:
        if self.zero == 3 and self.overlap:
            for buffer in buffers:
                self._start_gather(buffer)

    def _start_gather(self, buffer: FlatBuffer) -> None:
        if self._holders[buffer] or buffer in self._gathers:
            return
        buffer.allocate_parameters(zeroed=False)  # parts cover the buffer, padding included
        self._gathers[buffer] = self._gather([buffer])

    def _gather(self, buffers: Sequence[FlatBuffer]) -> Work:
        parts = [part for buffer in buffers for part in self._slices[buffer]]
        whole = [part.buffer.parameters[part.part.start : part.part.stop] for part in parts]
        return self.shards.all_gather(
            [part.parameters for part in parts], out=whole, purpose="parameters", async_op=True
        )

    def gather_parameters(self) -> None:
        """After the update, under ZeRO 1 and 2: every rank gets the parameters that the others updated, each block's
        before it runs next. Whoever reads them otherwise calls `wait_for_parameters` first."""
        if self.zero not in (1, 2) or not self.buffers:
            return
        if self.overlap:
            self._gathers = {buffer: self._gather([buffer]) for buffer in self.buffers}
        else:
            self._gather(self.buffers).wait()

    def wait_for_parameters(self) -> None:
        """Under ZeRO 1 and 2, all parameters are whole from here until the next update."""
        for work in self._gathers.values():
            work.wait()
        self._gathers.clear()
