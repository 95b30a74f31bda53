"""World: this rank's coordinates and one Comm per group of its; the only reader of RANK and its friends.

Ranks find each other through a key-value store: the agent's or torchrun's, or one that rank 0 serves (under srun). Each
rank says there what it runs on and what it is about to run; the ranks of one host then talk through shared memory, the
others through Gloo, GPUs through NCCL.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from phalanx.errors import CommError, LayoutError, RunError
from phalanx.plan.comm import Comm, Group
from phalanx.plan.groups import groups
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer.comm import GroupComm, SoloComm
from phalanx.trainer.process_group import ProcessGroupTransport, gloo_group
from phalanx.trainer.recorder import Recorder


class World:
    """What one rank knows of the others. `comm(name)` is its Comm of a group, of one member if it has none of that
    name; `recorder` counts what all of them send."""

    def __init__(
        self, *, rank: int, layout: Layout, device: torch.device, recorder: Recorder, comms: Mapping[str, GroupComm]
    ) -> None:
        self.rank, self.layout, self.device, self.recorder = rank, layout, device, recorder
        self.coord: Coord = layout.coord(rank)
        self._comms = dict(comms)

    def comm(self, name: str) -> Comm:
        """This rank's Comm of the group `name`."""
        return self._comms.get(name) or SoloComm(Group(name=name, ranks=(self.rank,)))

    def close(self) -> None:
        """Leave all groups: the others see that this rank is done, not dead. Call it only at a good end."""
        for comm in self._comms.values():
            comm.close()
        self._comms.clear()
        if self.recorder.ring:
            self.recorder.ring.close()


def connect(
    own: Sequence[Group], *, rank: int, store: dist.Store, recorder: Recorder, timeout_s: float
) -> dict[str, GroupComm]:
    """Build this rank's Comms, by group name."""
    comms = {}
    for group in own:
        index = group.ranks.index(rank)
        process_group = gloo_group(store, group, index, address="127.0.0.1", timeout_s=timeout_s)
        transport = ProcessGroupTransport([process_group], group, index)
        comms[group.name] = GroupComm(group, index, transport, recorder, timeout_s=timeout_s)
    return comms
