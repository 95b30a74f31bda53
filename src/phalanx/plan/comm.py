"""The Comm protocol: what a group of ranks can do together. Declared here, without torch, so that packages which move
state (checkpoint) or reason about messages (watch) need not know who moves the bytes.

Every call names its `purpose`; the group is the Comm's own. Bytes are counted by one convention, the one that
`plan.traffic` claims by (`payload_bytes`), whatever a transport does underneath.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

Tensor: TypeAlias = Any
ReduceOp = Literal["sum", "max"]
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv", "barrier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A set of ranks that talk: `name` says which axis or pair ("tensor", "data", "pipeline", "tied", …), `ranks` are
    global ranks in group order. A rank belongs to at most one group of each name."""

    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class Work(Protocol):
    """A call under way. After `wait` returned, results may be read and inputs reused. Waiting twice is allowed."""

    def wait(self) -> None:
        """Block until the call is complete; raises `CommError` past the time limit or when a member died."""


class Comm(Protocol):
    """One group, seen by one member. `index` is this member's place in `group.ranks`.

    All members make the same calls in the same order. A group of one does nothing and counts nothing. Collectives take
    several tensors as one message: they are packed, moved and counted together. Every call can be `async_op`: it then
    returns at once with a Work; otherwise it returns a Work that is already complete.
    """

    group: Group
    index: int

    @property
    def size(self) -> int:
        """Number of members."""

    def all_reduce(
        self, tensors: Tensor | Sequence[Tensor], *, purpose: str, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work:
        """Reduce in place over all members, in rank order, so that all hold identical bits.

        Payload: the bytes of `tensors`.
        """

    def all_gather(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        out: Tensor | Sequence[Tensor],
        purpose: str,
        async_op: bool = False,
    ) -> Work:
        """Concatenate every member's tensor along dim 0 into `out`, in rank order. `tensors[i]` may be this member's
        own piece of `out[i]` (in place). Payload: the bytes of `out`."""

    def reduce_scatter(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        out: Tensor | Sequence[Tensor],
        purpose: str,
        async_op: bool = False,
    ) -> Work:
        """Sum over members, in rank order, and keep this member's of `size` equal pieces along dim 0. `out[i]` may be
        this member's own piece of `tensors[i]` (in place); the other pieces are left as they are or overwritten.
        Payload: the bytes of `tensors`."""

    def broadcast(self, tensors: Tensor | Sequence[Tensor], *, root: int, purpose: str, async_op: bool = False) -> Work:
        """Copy from the member with index `root` to all, in place. Payload: the bytes of `tensors`."""

    def all_to_all(self, tensor: Tensor, *, out: Tensor, purpose: str, async_op: bool = False) -> Work:
        """Send piece j of `tensor` (equal pieces along dim 0) to member j; `out` collects in rank order. Payload: the
        bytes of `tensor`."""

    def send(self, tensor: Tensor, *, to: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """Send to the member with index `to`. Order is first in, first out per (source, destination, channel). The
        tensor must not be written until the Work is complete. Payload: the bytes of `tensor`."""

    def recv(self, tensor: Tensor, *, source: int, channel: int, purpose: str, async_op: bool = False) -> Work:
        """Receive into `tensor` from the member with index `source`. Payload: 0 (the sender counts)."""

    def barrier(self, *, purpose: str) -> None:
        """Return when all members have come. Payload: 0."""
