"""Gloo and NCCL behind Comm: the only caller of torch.distributed's process groups.

What these libraries do not promise is made here: lists of tensors travel as one message; sums run in rank order (Gloo's
ring adds in another order for each chunk) and in fp32 for shorter floating-point types; messages between two members
keep their order per channel.

The groups are built directly from the store, each by its members alone. torch's registry of groups, in which every rank
takes part in the creation of every group, is not needed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import CommError
from phalanx.plan.comm import Group
from phalanx.trainer.comm import Call

# Below this many bytes a sum of several members is one exchange of everything, above it two of slices.
_ONE_EXCHANGE_BYTES = 1 << 16
# Gloo's tags are 31 bits: the channel above, the count of messages on that channel below.
_COUNT_BITS = 24
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def gloo_group(store: dist.Store, group: Group, index: int, *, address: str, timeout_s: float) -> Any:
    """A Gloo process group that listens on `address` only ("127.0.0.1" when all members share this host).

    Raises CommError if the members do not all come within the time limit.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=3 * timeout_s)  # ours must come first: Gloo's error names nobody
    name = f"{group.name}:{group.ranks[0]}:{group.ranks[-1]}:{group.size}"
    try:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), index, group.size, options)
    except RuntimeError as error:
        raise CommError(f"group {group.name} of ranks {group.ranks} could not be built: {error}") from error


def nccl_group(store: dist.Store, group: Group, index: int, *, channel: int, timeout_s: float) -> Any:
    """An NCCL process group on the current GPU. One per channel: NCCL knows no tags, so that messages of two channels
    may only be told apart by travelling in groups of their own."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    name = f"{group.name}:{group.ranks[0]}:{group.ranks[-1]}:{group.size}:{channel}"
    return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), index, group.size, options)


class ProcessGroupTransport:
    """The Transport over one process group (Gloo), or one per channel (NCCL).

    Calls must also be waited for in the same order by all members: some begin a second exchange in `wait`.
    """

    def __init__(self, process_groups: Sequence[Any], group: Group, index: int) -> None:
        self._groups, self._size, self._index = process_groups, group.size, index
        self._gloo = process_groups[0].name() == "gloo"
        self._starters: dict[str, Callable[[Call], _Pending]] = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
            "all_to_all": self._all_to_all,
            "send": self._send,
            "recv": self._recv,
            "barrier": self._barrier,
        }

    def start(self, call: Call) -> _Pending:
        """See `Transport.start`."""
        try:
            pending = self._starters[call.shape.operation](call)
        except RuntimeError as error:
            raise CommError(_first_line(error)) from error
        pending.on_cpu = self._gloo
        return pending

    def close(self) -> None:
        """Break the connections; nothing is said about it on standard error."""
        for process_group in self._groups:
            process_group.shutdown()
        self._groups = ()

    def _all_reduce(self, call: Call) -> _Pending:
        packed = _pack(call.tensors)
        # Two terms have the same sum in any order, and a maximum knows no order.
        if not self._gloo or self._size == 2 or call.shape.op == "max":
            work = self._groups[0].allreduce(packed, _OPS[call.shape.op])
            return _Pending(work, lambda: _unpack(packed, call.tensors))
        if packed.nbytes <= _ONE_EXCHANGE_BYTES:
            every = packed.new_empty(self._size, packed.numel())
            work = self._groups[0]._allgather_base(every.view(-1), packed)
            return _Pending(work, lambda: _unpack(_sum(every), call.tensors))
        padded = packed.new_zeros(-(-packed.numel() // self._size) * self._size)
        padded[: packed.numel()] = packed
        pieces = torch.empty_like(padded)

        def second() -> Any:
            return self._groups[0]._allgather_base(padded, _sum(pieces.view(self._size, -1)))

        work = self._groups[0].alltoall_base(pieces, padded, [], [])
        return _Pending(work, lambda: _unpack(padded[: packed.numel()], call.tensors), second)

    def _all_gather(self, call: Call) -> _Pending:
        packed = _pack(call.tensors)
        if len(call.out) == 1:
            return _Pending(self._groups[0]._allgather_base(call.out[0].view(-1), packed))
        every = packed.new_empty(self._size, packed.numel())
        work = self._groups[0]._allgather_base(every.view(-1), packed)

        def finish() -> None:
            pieces = every.split([tensor.numel() for tensor in call.tensors], dim=1)
            for out, piece in zip(call.out, pieces, strict=True):
                out.view(self._size, -1).copy_(piece)

        return _Pending(work, finish)

    def _reduce_scatter(self, call: Call) -> _Pending:
        packed = call.tensors[0].view(self._size, -1)
        if len(call.tensors) > 1:  # rank-major: what goes to one member lies together
            packed = torch.cat([tensor.view(self._size, -1) for tensor in call.tensors], dim=1)
        if not self._gloo:
            total = packed.new_empty(packed.shape[1])
            work = self._groups[0]._reduce_scatter_base(total, packed.view(-1))
            return _Pending(work, lambda: _unpack(total, call.out))
        pieces = torch.empty_like(packed)
        work = self._groups[0].alltoall_base(pieces.view(-1), packed.view(-1), [], [])
        return _Pending(work, lambda: _unpack(_sum(pieces), call.out))

    def _broadcast(self, call: Call) -> _Pending:
        packed = _pack(call.tensors)
        work = self._groups[0].broadcast(packed, call.shape.peer)
        return _Pending(work, lambda: _unpack(packed, call.tensors))

    def _all_to_all(self, call: Call) -> _Pending:
        (tensor,), (out,) = call.tensors, call.out
        return _Pending(self._groups[0].alltoall_base(out.view(-1), tensor.view(-1), [], []))

    def _send(self, call: Call) -> _Pending:
        return _Pending(self._lane(call).send([call.tensors[0]], call.shape.peer, _tag(call)))

    def _recv(self, call: Call) -> _Pending:
        return _Pending(self._lane(call).recv([call.tensors[0]], call.shape.peer, _tag(call)))

    def _barrier(self, call: Call) -> _Pending:
        token = torch.zeros(1, device="cpu" if self._gloo else "cuda")
        # Reading the sum makes this process wait, not only its stream.
        return _Pending(self._groups[0].allreduce(token, dist.ReduceOp.SUM), lambda: token.cpu())

    def _lane(self, call: Call) -> Any:
        return self._groups[call.shape.channel % len(self._groups)]


class _Pending:
    """A call under way: torch's work, perhaps a second exchange after it, and what is left to do with the result."""

    def __init__(
        self, work: Any, finish: Callable[[], Any] | None = None, second: Callable[[], Any] | None = None
    ) -> None:
        self._work, self._finish, self._second = work, finish, second
        self.on_cpu = True

    def ready(self) -> bool:
        """See `Pending.ready`: these libraries go on by themselves, and asking costs as much as waiting."""
        return False

    def wait(self, timeout_s: float) -> None:
        """See `Pending.wait`. On a GPU it is the stream that waits, not this process, and NCCL that keeps the limit."""
        deadline = time.monotonic() + timeout_s
        try:
            self._wait_for(self._work, deadline)
            if self._second:
                self._wait_for(self._second(), deadline)
        except RuntimeError as error:
            late = time.monotonic() >= deadline - 0.01  # Gloo counts in whole milliseconds
            reason = (
                f"the time limit of {timeout_s:g} s is over" if late else f"a member has gone: {_first_line(error)}"
            )
            raise CommError(reason) from error
        if self._finish:
            self._finish()

    def _wait_for(self, work: Any, deadline: float) -> None:
        if self.on_cpu:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        else:
            work.wait()


def _tag(call: Call) -> int:
    return call.shape.channel << _COUNT_BITS | call.sequence % (1 << _COUNT_BITS)


def _sum(terms: Tensor) -> Tensor:
    """Sum over dim 0 in order; float16 and bfloat16 are added in fp32 and rounded once."""
    total = terms[0].float() if terms.dtype.itemsize == 2 and terms.is_floating_point() else terms[0].clone()
    for term in terms[1:]:
        total.add_(term)
    return total.to(terms.dtype)


def _pack(tensors: tuple[Tensor, ...]) -> Tensor:
    """One flat tensor with the contents of all; the tensor itself if it is one."""
    return tensors[0].view(-1) if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])


def _unpack(packed: Tensor, tensors: tuple[Tensor, ...]) -> None:
    """Copy back what `_pack` packed, unless it is the very tensor."""
    if len(tensors) == 1 and packed.data_ptr() == tensors[0].data_ptr():
        return
    pieces = packed.view(-1).split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.view(-1).copy_(piece)


def _first_line(error: Exception) -> str:
    """What a library says, without where in its sources it says so and its general advice."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[[^\]]*\]|This is typically caused by.*", "", line).strip()
