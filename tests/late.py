"""A transport that is as late as the contract of `Comm` allows, so that no luck hides a Work nobody waits for."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.trainer.comm import Call, GroupComm, Pending, Transport


class Late:
    """Stands between a Comm and its transport. What a call brings is not there before somebody waits for it (until then
    NaN stands there), and what it reads must not change until then; whatever was begun must be waited for."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.under_way: list[_LateCall] = []

    @classmethod
    def install(cls, comm: GroupComm) -> Late:
        """Put one under `comm`."""
        comm.transport = late = cls(comm.transport)
        return late

    def start(self, call: Call) -> Pending:
        """See `Transport.start`."""
        self.under_way.append(_LateCall(self, call))
        return self.under_way[-1].begin(self._transport)

    def close(self) -> None:
        """See `Transport.close`."""
        assert not self.under_way, f"nobody waited for {[str(call) for call in self.under_way]}"
        self._transport.close()


class _LateCall:
    """The call that its transport sees has tensors of its own; they are copied when the work is waited for."""

    def __init__(self, late: Late, call: Call) -> None:
        self._late, self._call = late, call
        self._read = tuple(tensor.clone() for tensor in call.tensors)
        out = tuple(tensor.clone() for tensor in call.out)
        self._private = Call(call.shape, tuple(tensor.clone() for tensor in self._read), out, call.sequence)
        in_place = call.shape.operation in ("all_reduce", "broadcast", "recv")
        self._written = call.tensors if in_place else call.out
        self._brought = self._private.tensors if in_place else out

    def __str__(self) -> str:
        return f"{self._call.shape.operation} of {self._call.shape.purpose}"

    def begin(self, transport: Transport) -> _LateCall:
        self._pending = transport.start(self._private)
        for tensor in self._written:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        return self

    def ready(self) -> bool:
        """See `Pending.ready`."""
        return False

    def wait(self, timeout_s: float) -> None:
        """See `Pending.wait`."""
        for tensor, before in zip(self._call.tensors, self._read, strict=True):
            assert self._overwritten(tensor) or torch.equal(tensor, before), f"input of {self} changed under way"
        if self._pending is not None:
            self._pending.wait(timeout_s)
        for tensor, value in zip(self._written, self._brought, strict=True):
            tensor.copy_(value)
        self._late.under_way.remove(self)

    def _overwritten(self, tensor: Tensor) -> bool:
        """Whether the result may stand where `tensor` does."""
        return any(tensor.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for out in self._written)
