"""Streams of fragments through shared memory: one process writes, others read.

A stream lives in a memfd of its writer, which has no name and so cannot be left behind; its descriptor is passed to the
readers when the stream is made. It is cut into slots. Counters in its header say how many fragments were posted and, by
each reader, taken; a writer may run ahead of its readers as long as it has free slots. It takes the slot that became
free last, whose lines are still in the cache. With each fragment goes a signature of the call, so that ranks which call
different things learn it at once instead of adding up what does not belong together.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.errors import CommError
from phalanx.trainer.neighbours import Key, Neighbours

SLOT_BYTES = 1024 * 1024
NUM_SLOTS = 4
ALIGN_BYTES = 64

# The header, in 8-byte words; what different processes write lies on different cache lines.
_LINE = 8
_POSTED, _WRITER_SLEEPS = 0, 1
_TAKEN, _READER_SLEEPS = 0, 1  # on line 1 + reader
_SHAPE = struct.Struct("<III")  # number of slots, number of readers, this reader


def why_not_here() -> str | None:
    """Why processes of this host cannot share memory this way; None if they can."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
        return "it needs Linux and Python 3.10"
    descriptor = os.memfd_create("phalanx", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, NUM_SLOTS * SLOT_BYTES)
    except OSError as error:
        return f"no room for {NUM_SLOTS * SLOT_BYTES} bytes of it: {error.strerror}"
    finally:
        os.close(descriptor)
    return None


class _Stream:
    """What both ends of a stream share: a mapping, its header as words, and its slots as tensors of any dtype."""

    def __init__(self, descriptor: int, num_slots: int, num_readers: int) -> None:
        self.num_slots, self.num_readers = num_slots, num_readers
        self.table = _LINE * (1 + num_readers)
        header_bytes = -(-8 * (self.table + 2 * num_slots) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_bytes = header_bytes + num_slots * SLOT_BYTES
        try:
            if os.fstat(descriptor).st_size < self.num_bytes:
                os.ftruncate(descriptor, self.num_bytes)
            mapping = mmap.mmap(descriptor, self.num_bytes)
        except OSError as error:
            raise CommError(f"no {self.num_bytes} bytes of shared memory: {error.strerror}") from error
        self.words = memoryview(mapping)[:header_bytes].cast("Q")
        self._slots = torch.frombuffer(mapping, dtype=torch.uint8)[header_bytes:]
        self._views: dict[tuple[torch.dtype, int, int, torch.Size], Tensor] = {}

    def view(self, dtype: torch.dtype, slot: int, start: int, shape: torch.Size) -> Tensor:
        """A tensor of this shape in a slot, from element `start` of it on."""
        key = (dtype, slot, start, shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 256:
                self._views.clear()
            first = slot * SLOT_BYTES + start * dtype.itemsize
            num_bytes = shape.numel() * dtype.itemsize
            view = self._views[key] = self._slots[first : first + num_bytes].view(dtype).view(shape)
        return view


class Outlet(_Stream):
    """The writer's end. As a Blocker: waits for a free slot. `posted` counts fragments written, `promised` those that
    calls have queued in `lane`."""

    def __init__(self, neighbours: Neighbours, key: Key, readers: tuple[int, ...], num_slots: int = NUM_SLOTS) -> None:
        self.ranks = readers
        self.posted = self.promised = 0
        self.lane = neighbours.lane()
        self._neighbours = neighbours
        self._free = list(range(num_slots))
        self._full: deque[tuple[int, int]] = deque()
        descriptor = os.memfd_create("phalanx", os.MFD_CLOEXEC)
        try:
            super().__init__(descriptor, num_slots, len(readers))
            for reader, rank in enumerate(readers):
                neighbours.send_memory(rank, key, _SHAPE.pack(num_slots, len(readers), reader), descriptor)
        finally:
            os.close(descriptor)
        self._taken = [_LINE * (1 + reader) + _TAKEN for reader in range(len(readers))]

    def ready(self) -> bool:
        """Whether there is a free slot."""
        full = self._full
        if full:
            words = self.words
            taken = min(map(words.__getitem__, self._taken))
            while full and full[0][0] < taken:
                self._free.append(full.popleft()[1])
        return bool(self._free)

    def post(self, dtype: torch.dtype, pieces: Sequence[tuple[int, Tensor]], signature: int) -> None:
        """Write a fragment, pieces of it at the given elements of the slot, and tell the readers."""
        slot = self._free.pop()
        for start, piece in pieces:
            self.view(dtype, slot, start, piece.shape).copy_(piece)
        # copy_ let go of the interpreter's lock and took it again, which orders its stores before those that follow.
        words, number = self.words, self.posted
        entry = self.table + 2 * (number % self.num_slots)
        words[entry], words[entry + 1] = slot, signature
        self._full.append((number, slot))
        self.posted = words[_POSTED] = number + 1
        with self._neighbours.fence:
            pass
        for reader, rank in enumerate(self.ranks):
            line = _LINE * (1 + reader)
            if words[line + _READER_SLEEPS]:
                words[line + _READER_SLEEPS] = 0
                self._neighbours.ring(rank)

    def flag(self, sleeping: bool) -> None:
        """See `Blocker.flag`."""
        self.words[_WRITER_SLEEPS] = sleeping


class Inlet(_Stream):
    """A reader's end. As a Blocker: waits for the next fragment."""

    def __init__(self, neighbours: Neighbours, writer: int, descriptor: int, shape: bytes) -> None:
        num_slots, num_readers, reader = _SHAPE.unpack(shape)
        self.ranks = (writer,)
        self._neighbours = neighbours
        self._line = _LINE * (1 + reader)
        self._next = 0
        try:
            super().__init__(descriptor, num_slots, num_readers)
        finally:
            os.close(descriptor)

    def ready(self) -> bool:
        """Whether a fragment lies there."""
        return self.words[_POSTED] > self._next

    def slot(self, signature: int) -> int:
        """The slot of the fragment that lies there. Raises CommError if it belongs to another call than ours."""
        entry = self.table + 2 * (self._next % self.num_slots)
        if self.words[entry + 1] != signature:
            raise CommError(f"rank {self.ranks[0]} made another call here, with another operation, purpose or size")
        return self.words[entry]

    def took(self) -> None:
        """Give the slot back to the writer."""
        words = self.words
        self._next = words[self._line + _TAKEN] = self._next + 1
        with self._neighbours.fence:
            pass
        if words[_WRITER_SLEEPS]:
            words[_WRITER_SLEEPS] = 0
            self._neighbours.ring(self.ranks[0])

    def flag(self, sleeping: bool) -> None:
        """See `Blocker.flag`."""
        self.words[self._line + _READER_SLEEPS] = sleeping


class Unopened:
    """Stands for an inlet until its writer has created the stream; the news comes over the socket."""

    def __init__(self, neighbours: Neighbours, writer: int, key: Key) -> None:
        self.ranks, self._memory, self._place = (writer,), neighbours.memory, (writer, key)

    def ready(self) -> bool:
        """Whether the stream is there."""
        return self._place in self._memory

    def flag(self, sleeping: bool) -> None:
        """Nobody to tell."""


# A piece of a fragment: number of the tensor, start and stop in a piece of it, and its place in the slot, in elements.
Fragment = tuple[int, tuple[tuple[int, int, int, int], ...]]


@functools.lru_cache(maxsize=1024)
def fragments(lengths: tuple[int, ...], capacity: int, align: int) -> tuple[Fragment, ...]:
    """Cut tensors of these lengths into fragments of at most `capacity` elements: for each, the elements that it takes
    up in a slot, and its pieces, which begin at multiples of `align`. Small tensors share a fragment; nothing at all is
    one empty fragment."""
    cut: list[Fragment] = []
    pieces: list[tuple[int, int, int, int]] = []
    used = 0
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            if used == capacity:
                cut.append((used, tuple(pieces)))
                pieces, used = [], 0
            stop = min(length, start + capacity - used)
            pieces.append((number, start, stop, used))
            used = min(capacity, -(-(used + stop - start) // align) * align)
            start = stop
    return (*cut, (used, tuple(pieces)))
