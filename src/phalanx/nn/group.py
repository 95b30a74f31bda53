"""The group of ranks that a layer is cut over, as a Comm."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import CommError
from phalanx.plan.comm import Comm, Group
from phalanx.trainer.comm import GroupComm, SoloComm
from phalanx.trainer.process_group import ProcessGroupTransport
from phalanx.trainer.recorder import Recorder


def comm_of(group: Any) -> Comm:
    """The Comm of a process group of torch.distributed; a Comm is handed through. None is the default group, or this
    process alone where none was initialised."""
    if isinstance(group, (GroupComm, SoloComm)):
        return group
    if group is None:
        if not dist.is_initialized():
            return SoloComm(Group(name="tensor", ranks=(0,)))
        group = dist.group.WORLD
    members = Group(name="tensor", ranks=tuple(dist.get_process_group_ranks(group)))
    if members.size == 1:
        return SoloComm(members)
    index = dist.get_rank(group)
    return GroupComm(members, index, ProcessGroupTransport([_Borrowed(group)], members, index), Recorder())


class _Borrowed:
    """The backend of a process group that torch.distributed owns. It is not held: when `destroy_process_group` lets go
    of it, it must end there, not whenever the last layer does."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        self._device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")

    def __getattr__(self, name: str) -> Any:
        group = self._group()
        if group is None:
            raise CommError("the process group of a layer was destroyed")
        return getattr(group._get_backend(self._device), name)
