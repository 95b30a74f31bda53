"""World: this rank's coordinates and one Comm per group of its.

What RANK and its friends say, `Process` reads; `launch.environment` has checked it before, without torch. Ranks find
each other through a key-value store: the agent's or torchrun's, or one that rank 0 serves (under srun). Each says there
what it runs on and what it is about to run. The ranks of one host then talk through shared memory, others through Gloo,
GPUs through NCCL.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import InputError, LayoutError, RunError
from phalanx.plan.comm import Comm, Group
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.module import ModulePlan
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import Action
from phalanx.rundir import RunDir
from phalanx.trainer.comm import GroupComm, SoloComm, Transport
from phalanx.trainer.neighbours import Listener, Neighbours
from phalanx.trainer.process_group import ProcessGroupTransport, gloo_group, nccl_group
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.rendezvous import check_equal, check_run, exchange, open_store, say
from phalanx.trainer.shared_memory import SharedMemoryTransport
from phalanx.trainer.streams import why_not_here
from phalanx.trainer.witness import testify
from phalanx.watch.events import RingWriter, ring_path

_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # netdevice(7)


class World:
    """What one rank knows of the others. `comm(name)` is its Comm of a group, of one member if it has none of that
    name; `recorder` counts what all of them send."""

    def __init__(
        self,
        *,
        rank: int,
        layout: Layout,
        device: torch.device,
        recorder: Recorder,
        comms: Mapping[str, GroupComm],
        neighbours: Neighbours | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self.rank, self.layout, self.device, self.recorder = rank, layout, device, recorder
        self.coord: Coord = layout.coord(rank)
        self._comms = dict(comms)
        self._neighbours = neighbours
        self._store = store  # under srun rank 0 serves it: it must outlive the slowest rank's start

    def comm(self, name: str) -> Comm:
        """This rank's Comm of the group `name`."""
        return self._comms.get(name) or SoloComm(Group(name=name, ranks=(self.rank,)))

    def follow(self, action: Action) -> None:
        """Keep the recorder informed of what this rank is about to do."""
        self.recorder.micro_batch, self.recorder.phase = action.micro_batch, action.kind

    def close(self) -> None:
        """Leave all groups: the others see that this rank is done, not dead. Call it only at a good end."""
        for comm in self._comms.values():
            comm.close()
        if self._neighbours:
            self._neighbours.close()
        if self.recorder.ring:
            self.recorder.ring.close()
            self.recorder.ring = None
        self._comms, self._neighbours, self._store = {}, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What whoever started this process says about it. `attempt` counts restarts; `serves`: it is to run the store.

    `run` names the run among those that may meet at its port, where that was not chosen for it alone: under srun."""

    rank: int
    num_ranks: int
    local_rank: int
    attempt: int
    address: str
    port: int
    serves: bool
    run: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Process | None:
        """Read the variables of our agent and torchrun, or of srun; None if nobody started this process as a rank."""
        if "RANK" in environ:
            rank = int(environ["RANK"])
            return cls(
                rank=rank,
                num_ranks=int(environ["WORLD_SIZE"]),
                local_rank=int(environ.get("LOCAL_RANK", "0")),
                attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                address=environ["MASTER_ADDR"],
                port=int(environ["MASTER_PORT"]),
                serves=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            )
        if "SLURM_STEP_ID" not in environ:
            return None
        job, step, rank = (int(environ[f"SLURM_{name}"]) for name in ("JOB_ID", "STEP_ID", "PROCID"))
        return cls(
            rank=rank,
            num_ranks=int(environ["SLURM_NTASKS"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            attempt=int(environ.get("SLURM_RESTART_COUNT", "0")),
            address=environ.get("MASTER_ADDR") or _slurm_address(environ),
            # Jobs and steps that share a node should not meet; below Linux' range for outgoing connections. The number
            # of ports is prime, so that steps of one number share one only in jobs that are as many jobs apart.
            port=int(environ.get("MASTER_PORT") or 10000 + (job * 16 + step) % 19997),
            serves=rank == 0,
            run=f"step {step} of Slurm's job {job}",
        )

    @classmethod
    def here(cls) -> Process:
        """As `read`; where nobody started this process as a rank, it is the only one."""
        alone = cls(rank=0, num_ranks=1, local_rank=0, attempt=0, address=_LOOPBACK, port=0, serves=True)
        return cls.read() or alone

    def open_store(self, timeout_s: float) -> dist.Store:
        """This run's store, known to be its own. Raises InputError and CommError as `rendezvous.open_store` does."""
        store = open_store(self.address, self.port, serve=self.serves, timeout_s=timeout_s)
        if self.run:
            check_run(store, self.rank, self.run, f"{self.address}:{self.port}")
        return store

    def take_device(self) -> torch.device:
        """The GPU of this process, from now on the one that torch means, or the CPU where there are none."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(device)
        return device


def join(plan: Plan | ModulePlan, run_dir: RunDir) -> World:
    """Become one rank of the run. Returns when all ranks have come.

    Raises LayoutError if there are more or fewer processes than the layout has ranks, RunError if ranks were started
    with different plans or software, CommError if not all come within the job's time limit, or another run's store is
    where this one's should be.
    """
    layout, job = plan.layout, plan.job
    process = Process.here()
    if process.num_ranks != layout.num_ranks:
        raise LayoutError(
            f"the layout ({layout}) needs {layout.num_ranks} processes, got {process.num_ranks}",
            instead=f"start {layout.num_ranks}, or change the layout",
        )
    rank = process.rank
    device = process.take_device()
    recorder = Recorder(_ring(ring_path(run_dir.path, rank), rank, str(layout.coord(rank))))
    if layout.num_ranks == 1:
        return World(rank=rank, layout=layout, device=device, recorder=recorder, comms={})
    store = process.open_store(job.comm_timeout_s)
    ours = dist.PrefixStore(f"attempt_{process.attempt}", store)
    facts = {"plan": plan.digest(), "torch": torch.__version__, "phalanx": phalanx.__version__}
    everyone = exchange(ours, rank, layout.num_ranks, "facts", facts, timeout_s=job.comm_timeout_s)
    check_equal(ours, rank, layout.num_ranks, plan, everyone, timeout_s=job.comm_timeout_s)
    comms, neighbours = connect(
        plan.groups(),
        rank=rank,
        num_ranks=layout.num_ranks,
        store=ours,
        recorder=recorder,
        shared_memory=job.comm == "auto",
        timeout_s=job.comm_timeout_s,
        device=device,
        master=(process.address, process.port),
        rings={other: ring_path(run_dir.path, other) for other in range(layout.num_ranks)},
    )
    return World(
        rank=rank,
        layout=layout,
        device=device,
        recorder=recorder,
        comms=comms,
        neighbours=neighbours,
        store=store,
    )


def _ring(path: Path, rank: int, coords: str) -> RingWriter | None:
    """This rank's ring file. Where there is no room for it, a run goes on without."""
    try:
        return RingWriter(path, rank=rank, coords=coords)
    except RunError as error:
        sys.stderr.write(f"WARNING: {error}; should this run fail, its report will lack this rank's last calls\n")
        return None


def connect(
    all_groups: Sequence[Group],
    *,
    rank: int,
    num_ranks: int,
    store: dist.Store,
    recorder: Recorder,
    timeout_s: float,
    shared_memory: bool = True,
    device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
    master: tuple[str, int] = (_LOOPBACK, 0),
    rings: Mapping[int, Path] | None = None,
) -> tuple[dict[str, GroupComm], Neighbours | None]:
    """Build this rank's Comms, by group name, and its connections to the ranks of its host if those use shared memory.

    All ranks pass the same `all_groups`. `master` is an address of the network between the hosts; `rings` the ranks'
    ring files, for error messages.
    """
    wanted = shared_memory and device.type == "cpu"
    problem = why_not_here() if wanted else "switched off"
    listener = None if problem else Listener()
    here = {"host": _host(), "name": listener.name if listener else "", "problem": problem}
    places = exchange(store, rank, num_ranks, "place", here, timeout_s=timeout_s)
    local = [other for other in range(num_ranks) if places[other]["host"] == here["host"]]
    problems = [places[other]["problem"] for other in local if places[other]["problem"]]
    if wanted and problems and rank == local[0]:
        say(f"shared memory cannot be used here ({problems[0]}): the ranks of this host talk through Gloo")
    neighbours = None
    if listener and not problems and len(local) > 1:
        names = {other: places[other]["name"] for other in local}
        neighbours = Neighbours(rank, names, listener, timeout_s=timeout_s)
    elif listener:
        listener.socket.close()
    readable = {other: path for other, path in (rings or {}).items() if other in local}
    addresses = dict.fromkeys(range(num_ranks), _LOOPBACK)
    if len(local) < num_ranks:
        addresses = _addresses(store, rank, num_ranks, master, timeout_s)
    elsewhere = {other: address for other, address in addresses.items() if other not in local}
    comms = {}
    for number, group in enumerate(all_groups):
        if rank not in group.ranks:
            continue
        index = group.ranks.index(rank)
        transport: Transport
        if neighbours and set(group.ranks) <= set(local):
            transport = SharedMemoryTransport(neighbours, group, index, number)
        else:
            address = _LOOPBACK if set(group.ranks) <= set(local) else addresses[rank]
            transport = _between_hosts(store, group, index, device, address, timeout_s)
        comms[group.name] = GroupComm(
            group,
            index,
            transport,
            recorder,
            timeout_s=timeout_s,
            witness=partial(testify, index=index, rings=readable, elsewhere=elsewhere),
        )
    return comms, neighbours


def _between_hosts(
    store: dist.Store, group: Group, index: int, device: torch.device, address: str, timeout_s: float
) -> ProcessGroupTransport:
    if device.type == "cuda":
        channels = 2 if group.name == "pipeline" else 1
        process_groups = [
            nccl_group(store, group, index, channel=channel, timeout_s=timeout_s) for channel in range(channels)
        ]
    else:
        process_groups = [gloo_group(store, group, index, address=address, timeout_s=timeout_s)]
    return ProcessGroupTransport(process_groups, group, index)


def _host() -> str:
    """Equal for processes that can share memory and see each other's abstract sockets: one kernel, one network."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    if boot.exists() and network.exists():
        return f"{boot.read_text().strip()} {os.readlink(network)}"
    return platform.node()


def _addresses(
    store: dist.Store, rank: int, num_ranks: int, master: tuple[str, int], timeout_s: float
) -> dict[int, str]:
    """Each rank's address on the network between the hosts.

    A host may resolve its own name, and so `master`, to a loopback address: it then takes the one that leads to another
    host.
    """
    own = exchange(store, rank, num_ranks, "address", _own_address(*master), timeout_s=timeout_s)
    outside = next((address for address in own if not address.startswith("127.")), _LOOPBACK)
    better = _own_address(outside, 0) if own[rank].startswith("127.") else own[rank]
    return dict(enumerate(exchange(store, rank, num_ranks, "outside address", better, timeout_s=timeout_s)))


def _own_address(master: str, port: int) -> str:
    """The address of this host on the network that leads to `master`, or of GLOO_SOCKET_IFNAME if that is set."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if not interface:
            probe.connect((master, port or 1))  # sends nothing: asks the kernel for the route
            return str(probe.getsockname()[0])
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, interface.encode()[:15].ljust(40, b"\0"))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise InputError(
                f"'{interface}' is no network interface of this host with an address: {error.strerror}",
                where="GLOO_SOCKET_IFNAME",
                instead=f"one plain name of: {names}",
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _slurm_address(environ: Mapping[str, str]) -> str:
    """The first host of this step, which runs rank 0; loopback if it is the only one."""
    if int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1"))) == 1:
        return _LOOPBACK
    return first_host(environ["SLURM_STEP_NODELIST"])


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: node001 of `node[001-003,007],other`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", node_list)
    assert match, f"'{node_list}' is no node list"
    return "".join(part or "" for part in match.groups())
