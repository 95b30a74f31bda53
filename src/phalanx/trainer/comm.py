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
from typing import Protocol

import torch
from torch import Tensor

from phalanx.errors import CommError
from phalanx.plan.comm import Comm, Group, Operation, ReduceOp, Work
from phalanx.trainer.recorder import Recorder, Site

Tensors = Tensor | Sequence[Tensor]


@dataclass(slots=True, eq=False)
class Call:
    """One call as a transport sees it. All tensors are contiguous and of one dtype.

    `out` is empty for operations in place. `peer` is an index in the group (root, destination, source) or -1.
    `sequence` counts the group's collectives, or the messages of one (peer, channel, direction), from 1.
    """

    operation: Operation
    purpose: str
    tensors: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    op: ReduceOp
    peer: int
    channel: int
    sequence: int


class Pending(Protocol):
    """A transport's side of a call under way."""

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

    `witness(call's group, purpose, sequence, peer)` is asked, when a call fails, what the other members are doing.
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
        self._sites: dict[tuple[str, str, str, torch.dtype | None], Site] = {}

    def all_reduce(self, tensors: Tensors, *, purpose: str, op: ReduceOp = "sum", async_op: bool = False) -> Work:
        """See `Comm.all_reduce`."""
        tensors = _tuple(tensors)
        return self._collective("all_reduce", purpose, tensors, (), _bytes(tensors), async_op, op=op)

    def all_gather(self, tensors: Tensors, *, out: Tensors, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.all_gather`."""
        tensors, out = _tuple(tensors), _tuple(out)
        _check_sizes(tensors, out, self.size)
        return self._collective("all_gather", purpose, tensors, out, _bytes(out), async_op)

    def reduce_scatter(self, tensors: Tensors, *, out: Tensors, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.reduce_scatter`."""
        tensors, out = _tuple(tensors), _tuple(out)
        _check_sizes(out, tensors, self.size)
        return self._collective("reduce_scatter", purpose, tensors, out, _bytes(tensors), async_op)

    def broadcast(self, tensors: Tensors, *, root: int, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.broadcast`."""
        tensors = _tuple(tensors)
        return self._collective("broadcast", purpose, tensors, (), _bytes(tensors), async_op, peer=root)

    def all_to_all(self, tensor: Tensor, *, out: Tensor, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.all_to_all`."""
        tensors, out_ = _tuple(tensor), _tuple(out)
        _check_sizes(tensors, out_, 1)
        assert tensor.numel() % self.size == 0, f"{tensor.numel()} elements do not split into {self.size} pieces"
        return self._collective("all_to_all", purpose, tensors, out_, _bytes(tensors), async_op)

    def send(self, tensor: Tensor, *, to: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.send`."""
        return self._message("send", purpose, _tuple(tensor), to, channel, _bytes((tensor,)), async_op)

    def recv(self, tensor: Tensor, *, source: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """See `Comm.recv`."""
        return self._message("recv", purpose, _tuple(tensor), source, channel, 0, async_op)

    def barrier(self, *, purpose: str) -> None:
        """See `Comm.barrier`."""
        self._collective("barrier", purpose, (), (), 0, False)

    def close(self) -> None:
        """Leave the group; no call may follow."""
        self.transport.close()

    def _collective(
        self,
        operation: Operation,
        purpose: str,
        tensors: tuple[Tensor, ...],
        out: tuple[Tensor, ...],
        payload_bytes: int,
        async_op: bool,
        *,
        op: ReduceOp = "sum",
        peer: int = -1,
    ) -> Work:
        self._collectives += 1
        call = Call(operation, purpose, tensors, out, op, peer, -1, self._collectives)
        return self._start(call, payload_bytes, async_op)

    def _message(
        self,
        operation: Operation,
        purpose: str,
        tensors: tuple[Tensor, ...],
        peer: int,
        channel: int,
        payload_bytes: int,
        async_op: bool,
    ) -> Work:
        assert 0 <= peer < self.size, f"{operation} with member {peer} of {self.size}"
        assert peer != self.index, f"{operation} with oneself"
        key = (operation, peer, channel)
        sequence = self._messages[key] = self._messages.get(key, 0) + 1
        call = Call(operation, purpose, tensors, (), "sum", peer, channel, sequence)
        return self._start(call, payload_bytes, async_op)

    def _start(self, call: Call, payload_bytes: int, async_op: bool) -> Work:
        since_s = time.perf_counter()
        recorder = self.recorder
        peer = self.group.ranks[call.peer] if call.peer >= 0 else -1
        number = recorder.begin(
            self._site(call), sequence=call.sequence, payload_bytes=payload_bytes, peer=peer, channel=call.channel
        )
        try:
            pending = self.transport.start(call)
        except CommError as error:
            raise self._in_words(call, error) from None
        if pending is None:
            recorder.end(number)
            recorder.spent(self.group.name, since_s)
            return DONE
        recorder.spent(self.group.name, since_s)
        work = _Work(self, call, number, pending)
        if async_op:
            return work
        work.wait()
        return DONE

    def _finish(self, call: Call, number: int, pending: Pending) -> None:
        since_s = time.perf_counter()
        self.recorder.wait(number)
        try:
            pending.wait(self._timeout_s)
        except CommError as error:
            raise self._in_words(call, error) from None
        self.recorder.end(number)
        self.recorder.spent(self.group.name, since_s)

    def _site(self, call: Call) -> Site:
        tensors = call.tensors
        dtype = tensors[0].dtype if tensors else None
        key = (call.operation, call.purpose, call.op, dtype)
        site = self._sites.get(key)
        if site is None:
            reduces = call.operation in ("all_reduce", "reduce_scatter")
            name = str(dtype).removeprefix("torch.") if dtype else ""
            site = self.recorder.site(self.group, call.operation, call.purpose, call.op if reduces else "", name)
            self._sites[key] = site
        return site

    def _in_words(self, call: Call, error: CommError) -> CommError:
        ranks = ", ".join(map(str, self.group.ranks)) if self.size <= 16 else f"{self.size} ranks"
        toward = {"send": "to", "recv": "from"}.get(call.operation)
        peer = f" {toward} rank {self.group.ranks[call.peer]} on channel {call.channel}" if toward else ""
        told = self._witness(self.group, call)
        return CommError(
            f"rank {self.group.ranks[self.index]}: {call.operation} '{call.purpose}' #{call.sequence}{peer} "
            f"of group {self.group.name} ({ranks}) failed in {self.recorder.place}: {error}"
            + (f"\n{told}" if told else "")
        )


class _Work:
    """A call under way on a GroupComm."""

    __slots__ = ("_arguments", "_comm")

    def __init__(self, comm: GroupComm, *arguments: object) -> None:
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
        _check_sizes(tensors, out, 1)
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
        if call.operation == "recv":
            call.tensors[0].zero_()
        for tensor, out in zip(call.tensors, call.out, strict=bool(call.out)):
            if call.operation == "all_gather":
                mine = tensor.reshape(-1).clone()
                out.view(self._size, -1).copy_(mine.expand(self._size, -1))
            elif call.operation == "reduce_scatter":
                out.view(-1).copy_(tensor.view(self._size, -1)[self._index])
            else:
                out.copy_(tensor)

    def close(self) -> None:
        """Nothing is held."""


def _tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """The tensors of a call, checked to be contiguous and of one dtype, so that they can be packed as one message, and
    cut off from autograd, which knows nothing of other processes."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    assert tensors, "a call without tensors"
    if any(tensor.requires_grad for tensor in tensors):
        tensors = tuple(tensor.detach() for tensor in tensors)
    dtype = tensors[0].dtype
    for tensor in tensors:
        assert tensor.is_contiguous(), f"a tensor of shape {tuple(tensor.shape)} that is not contiguous"
        assert tensor.dtype == dtype, f"{tensor.dtype} and {dtype} in one call"
    return tensors


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _check_sizes(pieces: tuple[Tensor, ...], wholes: tuple[Tensor, ...], size: int) -> None:
    assert len(pieces) == len(wholes), f"{len(pieces)} tensors but {len(wholes)} out"
    for piece, whole in zip(pieces, wholes, strict=True):
        assert piece.numel() * size == whole.numel(), f"{size} times {piece.numel()} elements are not {whole.numel()}"
        assert piece.dtype == whole.dtype, f"{piece.dtype} into {whole.dtype}"


def _conforms(comm: GroupComm | SoloComm) -> Comm:
    """Lets a type checker hold both classes against the protocol."""
    return comm
