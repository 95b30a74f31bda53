"""A Comm whose messages never travel while this rank computes: what overlap is measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.plan.comm import Comm, Work


class BlockingComm:
    """`comm`, of which every collective is complete when it returns, and every receive begins when it is waited for.

    A send goes on as it is, since two ranks that send to each other would otherwise wait for ever.
    """

    def __init__(self, comm: Comm) -> None:
        self.group, self.index, self.size = comm.group, comm.index, comm.size
        self.broadcast, self.all_to_all = comm.broadcast, comm.all_to_all
        self.send, self.barrier = comm.send, comm.barrier
        self._comm = comm

    def all_reduce(self, tensors: Any, *, async_op: bool = False, **options: Any) -> Work:
        """See `Comm.all_reduce`."""
        return self._comm.all_reduce(tensors, **options)

    def all_gather(self, tensors: Any, *, async_op: bool = False, **options: Any) -> Work:
        """See `Comm.all_gather`."""
        return self._comm.all_gather(tensors, **options)

    def reduce_scatter(self, tensors: Any, *, async_op: bool = False, **options: Any) -> Work:
        """See `Comm.reduce_scatter`."""
        return self._comm.reduce_scatter(tensors, **options)

    def recv(self, tensor: Any, *, async_op: bool = False, **options: Any) -> Work:
        """See `Comm.recv`."""
        return _Later(lambda: self._comm.recv(tensor, **options)) if async_op else self._comm.recv(tensor, **options)


class _Later:
    """A call that is made when it is waited for."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def wait(self) -> None:
        """See `plan.comm.Work.wait`."""
        call, self._call = self._call, None
        if call:
            call()
