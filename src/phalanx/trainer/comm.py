"""Comm: the one door through which ranks talk. It counts, times and records each call, and says in words what failed.

`GroupComm` does that for every group; how bytes move is the matter of its Transport: shared memory between processes
of one host (`shared_memory`), Gloo between hosts and NCCL between GPUs (`process_group`), or not at all (`Counting`, to
rehearse one rank alone). A group of one needs no transport: `SoloComm`.

A Comm belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.errors import CommError
from phalanx.plan.comm import Comm, Group, Operation, ReduceOp, Work
from phalanx.trainer.recorder import Recorder, Site

Tensors = Tensor | Sequence[Tensor]


@dataclass(slots=True, eq=False)
class Shape:
    """What all calls of one kind share; made once and recognized again, so that a call costs little.

    `peer` is an index in the group (root, destination, source) or -1, `channel` -1 unless it is a message. `lengths`
    and `out_lengths` are the elements of the tensors. `route` is the transport's own note.
    """

    operation: Operation
    purpose: str
    op: ReduceOp
    peer: int
    channel: int
    dtype: torch.dtype
    lengths: tuple[int, ...]
    out_lengths: tuple[int, ...]
    payload_bytes: int
    site: Site
    route: Any = None


@dataclass(slots=True, eq=False)
class Call:
    """One call as a transport sees it. All tensors are contiguous and of one dtype; `out` is empty for operations in
    place. `sequence` counts the group's collectives, or the messages of one (peer, channel, direction), from 1."""

    shape: Shape
    tensors: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    sequence: int


class Pending(Protocol):
    """A transport's side of a call under way."""

    def ready(self) -> bool:
        """Go on without blocking; whether it is complete. Raises CommError for calls that do not match."""

    def wait(self, timeout_s: float) -> None:
        """Block until complete. Raises CommError with the bare reason: a dead member, or the time limit."""


class Transport(Protocol):
    """Moves bytes among the members of one group. Sums run in rank order."""

    def start(self, call: Call) -> Pending | None:
        """Begin a call. None if it is already complete."""

    def close(self) -> None:
        """Let go of everything; the peers see that this member left."""


class GroupComm:
    """A Comm over a transport; see `plan.comm.Comm` for what each call does.

    `witness(group, call)` is asked, when a call fails, what the other members are doing.
    """

    def __init__(
        self,
        group: Group,
        index: int,
        transport: Transport,
        recorder: Recorder,
        *,
        timeout_s: float = 600.0,
        witness: Callable[[Group, Call], str] = lambda group, call: "",
    ) -> None:
        assert group.size > 1, f"group {group.name} has one member: use SoloComm"
        self.group, self.index, self.size = group, index, group.size
        self.transport, self.recorder = transport, recorder
        self._timeout_s, self._witness = timeout_s, witness
        self._collectives = 0
        self._messages: dict[tuple[str, int, int], int] = {}
        self._shapes: dict[tuple[object, ...], Shape] = {}

    def all_reduce(self, tensors: Tensors, *, purpose: str, op: ReduceOp = "sum", async_op: bool = False) -> Work:
        """See `Comm.all_reduce`."""
        return self._collective("all_reduce", purpose, _tuple(tensors), (), async_op, op)

    def all_gather(self, tensors: Tensors, *, out: Tensors, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.all_gather`."""
        return self._collective("all_gather", purpose, _tuple(tensors), _tuple(out), async_op)

    def reduce_scatter(self, tensors: Tensors, *, out: Tensors, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.reduce_scatter`."""
        return self._collective("reduce_scatter", purpose, _tuple(tensors), _tuple(out), async_op)

    def broadcast(self, tensors: Tensors, *, root: int, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.broadcast`."""
        return self._collective("broadcast", purpose, _tuple(tensors), (), async_op, "sum", root)

    def all_to_all(self, tensor: Tensor, *, out: Tensor, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.all_to_all`."""
        return self._collective("all_to_all", purpose, _tuple(tensor), _tuple(out), async_op)

    def send(self, tensor: Tensor, *, to: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.send`."""
        return self._message("send", purpose, _tuple(tensor), to, channel, async_op)

    def recv(self, tensor: Tensor, *, source: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.recv`."""
        return self._message("recv", purpose, _tuple(tensor), source, channel, async_op)

    def barrier(self, *, purpose: str) -> None:
        """See `Comm.barrier`."""
        self._collective("barrier", purpose, (), (), False)

    def close(self) -> None:
        """Leave the group; no call may follow."""
        self.transport.close()

    def _collective(
        self,
        operation: Operation,
        purpose: str,
        tensors: tuple[Tensor, ...],
        out: tuple[Tensor, ...],
        async_op: bool,
        op: ReduceOp = "sum",
        root: int = -1,
    ) -> Work:
        self._collectives += 1
        shape = self._shape(operation, purpose, tensors, out, op, root, -1)
        return self._start(Call(shape, tensors, out, self._collectives), async_op)

    def _message(
        self, operation: Operation, purpose: str, tensors: tuple[Tensor, ...], peer: int, channel: int, async_op: bool
    ) -> Work:
        key = (operation, peer, channel)
        sequence = self._messages[key] = self._messages.get(key, 0) + 1
        shape = self._shape(operation, purpose, tensors, (), "sum", peer, channel)
        return self._start(Call(shape, tensors, (), sequence), async_op)

    def _start(self, call: Call, async_op: bool) -> Work:
        since_s = time.perf_counter()
        shape, recorder = call.shape, self.recorder
        peer = self.group.ranks[shape.peer] if shape.peer >= 0 else -1
        number = recorder.begin(shape.site, call.sequence, shape.payload_bytes, peer, shape.channel)
        try:
            pending = self.transport.start(call)
            if pending is not None:
                if async_op:
                    recorder.spent(self.group.name, since_s)
                    return _Work(self, call, number, pending)
                if not pending.ready():
                    recorder.wait(number)
                    pending.wait(self._timeout_s)
        except CommError as error:
            raise self._in_words(call, error) from None
        recorder.end(number)
        recorder.spent(self.group.name, since_s)
        return DONE

    def _finish(self, call: Call, number: int, pending: Pending) -> None:
        since_s = time.perf_counter()
        try:
            if not pending.ready():
                self.recorder.wait(number)
                pending.wait(self._timeout_s)
        except CommError as error:
            raise self._in_words(call, error) from None
        self.recorder.end(number)
        self.recorder.spent(self.group.name, since_s)

    def _shape(
        self,
        operation: Operation,
        purpose: str,
        tensors: tuple[Tensor, ...],
        out: tuple[Tensor, ...],
        op: ReduceOp,
        peer: int,
        channel: int,
    ) -> Shape:
        dtype = tensors[0].dtype if tensors else torch.uint8
        lengths, out_lengths = tuple(map(Tensor.numel, tensors)), tuple(map(Tensor.numel, out))
        key = (operation, purpose, op, peer, channel, dtype, lengths, out_lengths)
        shape = self._shapes.get(key)
        if shape is None:
            payload = out_lengths if operation == "all_gather" else lengths if operation != "recv" else ()
            num_bytes = sum(payload) * dtype.itemsize
            reduces = operation in ("all_reduce", "reduce_scatter")
            site = self.recorder.site(
                self.group, operation, purpose, op if reduces else "", dtype_name(dtype) if tensors else ""
            )
            shape = Shape(operation, purpose, op, peer, channel, dtype, lengths, out_lengths, num_bytes, site)
            _check(shape, self.size, self.index)
            self._shapes[key] = shape
        assert not out or out[0].dtype == dtype, f"{operation} of {dtype} into {out[0].dtype}"
        return shape

    def _in_words(self, call: Call, error: CommError) -> CommError:
        shape = call.shape
        ranks = ", ".join(map(str, self.group.ranks)) if self.size <= 16 else f"{self.size} ranks"
        toward = {"send": "to", "recv": "from"}.get(shape.operation)
        peer = f" {toward} rank {self.group.ranks[shape.peer]} on channel {shape.channel}" if toward else ""
        told = self._witness(self.group, call)
        return CommError(
            f"rank {self.group.ranks[self.index]}: {shape.operation} '{shape.purpose}' #{call.sequence}{peer} "
            f"({shape.payload_bytes} bytes) of group {self.group.name} ({ranks}) failed in {self.recorder.place}: "
            f"{error}" + (f"\n{told}" if told else "")
        )


class _Work:
    """A call under way on a GroupComm."""

    __slots__ = ("_arguments", "_comm")

    def __init__(self, comm: GroupComm, *arguments: Any) -> None:
        self._comm, self._arguments = comm, arguments

    def wait(self) -> None:
        """See `plan.comm.Work.wait`."""
        if self._arguments:
            arguments, self._arguments = self._arguments, ()  # lets go of the tensors, too
            self._comm._finish(*arguments)


class _Done:
    """A call that is complete."""

    __slots__ = ()

    def wait(self) -> None:
        """Nothing is left to wait for."""


DONE = _Done()


class SoloComm:
    """The Comm of a group of one: does what the sums and copies come to with one member, counts nothing."""

    def __init__(self, group: Group) -> None:
        assert group.size == 1, f"group {group.name} has {group.size} members"
        self.group, self.index, self.size = group, 0, 1

    def all_reduce(self, tensors: Tensors, *, purpose: str, op: ReduceOp = "sum", async_op: bool = False) -> Work:
        """The sum of one is itself."""
        return DONE

    def all_gather(self, tensors: Tensors, *, out: Tensors, purpose: str, async_op: bool = False) -> Work:
        """`out` becomes `tensors`."""
        return self._copy(tensors, out)

    def reduce_scatter(self, tensors: Tensors, *, out: Tensors, purpose: str, async_op: bool = False) -> Work:
        """`out` becomes `tensors`."""
        return self._copy(tensors, out)

    def broadcast(self, tensors: Tensors, *, root: int, purpose: str, async_op: bool = False) -> Work:
        """All members have it already."""
        assert root == 0, f"root {root} of a group of one"
        return DONE

    def all_to_all(self, tensor: Tensor, *, out: Tensor, purpose: str, async_op: bool = False) -> Work:
        """`out` becomes `tensor`."""
        return self._copy(tensor, out)

    def send(self, tensor: Tensor, *, to: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """There is nobody to send to: a mistake of ours."""
        raise AssertionError(f"send '{purpose}' in group {self.group.name} of one member")

    def recv(self, tensor: Tensor, *, source: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """There is nobody to receive from: a mistake of ours."""
        raise AssertionError(f"recv '{purpose}' in group {self.group.name} of one member")

    def barrier(self, *, purpose: str) -> None:
        """All have come."""

    def close(self) -> None:
        """Nothing is held."""

    def _copy(self, tensors: Tensors, out: Tensors) -> Work:
        tensors, out = _tuple(tensors), _tuple(out)
        for source, target in zip(tensors, out, strict=True):
            if source.data_ptr() != target.data_ptr():
                target.copy_(source.view_as(target))
        return DONE


class Counting:
    """A transport that moves nothing: what other members would have sent is taken to be this member's own, so that
    every result is finite and every shape right. Received tensors become zero."""

    def __init__(self, group: Group, index: int) -> None:
        self._size, self._index = group.size, index

    def start(self, call: Call) -> None:
        """See `Transport.start`."""
        operation = call.shape.operation
        if operation == "recv":
            call.tensors[0].zero_()
        for tensor, out in zip(call.tensors, call.out, strict=bool(call.out)):
            if operation == "all_gather":
                mine = tensor.reshape(-1).clone()
                out.view(self._size, -1).copy_(mine.expand(self._size, -1))
            elif operation == "reduce_scatter":
                out.view(-1).copy_(tensor.view(self._size, -1)[self._index])
            else:
                out.copy_(tensor)

    def close(self) -> None:
        """Nothing is held."""


def dtype_name(dtype: torch.dtype) -> str:
    """As `float32`: how ring files call it."""
    return str(dtype).removeprefix("torch.")


def _tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """The tensors of a call, checked to be contiguous and of one dtype, so that they can be packed as one message, and
    cut off from autograd, which knows nothing of other processes."""
    if isinstance(tensors, Tensor):
        assert tensors.is_contiguous(), f"a tensor of shape {tuple(tensors.shape)} that is not contiguous"
        return (tensors.detach(),) if tensors.requires_grad else (tensors,)
    tensors = tuple(tensors)
    assert tensors, "a call without tensors"
    dtype = tensors[0].dtype
    for tensor in tensors:
        assert tensor.is_contiguous(), f"a tensor of shape {tuple(tensor.shape)} that is not contiguous"
        assert tensor.dtype == dtype, f"{tensor.dtype} and {dtype} in one call"
    if any(tensor.requires_grad for tensor in tensors):
        tensors = tuple(tensor.detach() for tensor in tensors)
    return tensors


def _check(shape: Shape, size: int, index: int) -> None:
    """Assert that the sizes of a call fit together."""
    what = f"{shape.operation} '{shape.purpose}'"
    if shape.out_lengths:
        pieces, wholes = shape.lengths, shape.out_lengths
        if shape.operation == "reduce_scatter":
            pieces, wholes = wholes, pieces
        times = 1 if shape.operation == "all_to_all" else size
        assert len(pieces) == len(wholes), f"{what} of {len(shape.lengths)} tensors into {len(shape.out_lengths)}"
        for piece, whole in zip(pieces, wholes, strict=True):
            assert piece * times == whole, f"{what}: {times} times {piece} elements are not {whole}"
            assert whole % size == 0, f"{what}: {whole} elements do not split into {size} pieces"
    if shape.operation in ("send", "recv", "broadcast"):
        assert 0 <= shape.peer < size, f"{what} with member {shape.peer} of {size}"
        assert shape.peer != index or shape.operation == "broadcast", f"{what} with oneself"


def _conforms(comm: GroupComm | SoloComm) -> Comm:
    """Lets a type checker hold both classes against the protocol."""
    return comm
