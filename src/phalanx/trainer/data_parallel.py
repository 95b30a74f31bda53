"""Data parallelism over flat buffers: gradients are summed in buckets while backward still runs; ZeRO cuts what each
data rank keeps.

ZeRO 0: gradients are all-reduced, every rank updates everything. ZeRO 1: each part of each buffer is cut evenly over
the data axis; gradients are reduce-scattered into this rank's shards, it updates those, and parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.plan.comm import Comm, Work
from phalanx.plan.shards import Part, Piece, Rectangle
from phalanx.trainer.flat import FlatBuffer


@dataclass(frozen=True, slots=True)
class Slice:
    """What this rank updates of one part: elements [start, stop) of the buffer."""

    buffer: FlatBuffer
    part: Part
    start: int
    stop: int

    @property
    def parameters(self) -> Tensor:
        """View in the compute dtype."""
        return self.buffer.parameters[self.start : self.stop]

    @property
    def gradients(self) -> Tensor:
        """View in the accumulation dtype."""
        return self.buffer.gradients[self.start : self.stop]

    def rectangles(self) -> Iterator[tuple[Piece, Rectangle, slice]]:
        """Which rectangle of which parameter each stretch of this slice holds; padding is left out."""
        for piece in self.buffer.layout.pieces:
            for first, box in piece.rectangles(self.start, self.stop):
                yield piece, box, slice(first - self.start, first - self.start + box.num_elements)


class DataParallel:
    """The buffers of one rank, over the Comm of its data group."""

    def __init__(self, buffers: Sequence[FlatBuffer], comm: Comm, zero: int, bucket_bytes: int) -> None:
        self.buffers, self.comm, self.bucket_bytes = tuple(buffers), comm, bucket_bytes
        self.sharded = zero >= 1 and comm.size > 1
        self.slices = tuple(self._slice(buffer, part) for buffer in buffers for part in buffer.layout.parts)
        self._bucket: list[FlatBuffer] = []
        self._works: list[Work] = []
        self._num_final = 0

    def _slice(self, buffer: FlatBuffer, part: Part) -> Slice:
        start, stop = part.shard(self.comm.index, self.comm.size) if self.sharded else (part.start, part.stop)
        return Slice(buffer, part, start, stop)

    def zero_gradients(self) -> None:
        """Before the first action of a step."""
        for buffer in self.buffers:
            buffer.gradients.zero_()
        self._num_final = 0

    def on_final(self, buffer: FlatBuffer) -> None:
        """Nothing will be added to `buffer` any more: reduce it, once enough such buffers make a bucket. All data ranks
        run the same schedule, so they form the same buckets in the same order."""
        self._num_final += 1
        self._bucket.append(buffer)
        if sum(member.gradients.nbytes for member in self._bucket) >= self.bucket_bytes:
            self._reduce()

    def finish(self) -> None:
        """Reduce what is left and wait: after this, `slices` hold the gradients of the global batch."""
        assert self._num_final == len(self.buffers), f"{self._num_final} of {len(self.buffers)} buffers became final"
        if self._bucket:
            self._reduce()
        for work in self._works:
            work.wait()
        self._works.clear()

    def _reduce(self) -> None:
        bucket, self._bucket = self._bucket, []
        if not self.sharded:
            tensors = [buffer.gradients for buffer in bucket]
            self._works.append(self.comm.all_reduce(tensors, purpose="gradients", async_op=True))
            return
        mine = [part for part in self.slices if part.buffer in bucket]
        whole = [part.buffer.gradients[part.part.start : part.part.stop] for part in mine]
        out = [part.gradients for part in mine]
        self._works.append(self.comm.reduce_scatter(whole, out=out, purpose="gradients", async_op=True))

    def gather_parameters(self) -> None:
        """Under ZeRO 1, after the update: every rank gets the parameters that the others updated."""
        if self.sharded and self.slices:
            whole = [part.buffer.parameters[part.part.start : part.part.stop] for part in self.slices]
            self.comm.all_gather([part.parameters for part in self.slices], out=whole, purpose="parameters")
