"""Measure what messages cost between the ranks of one machine, and between machines; and write all as a cluster file.

Run as one process per device: by `phalanx measure`, or by torchrun or srun over several machines.
"""

from __future__ import annotations

import functools
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import InputError
from phalanx.plan.comm import Comm, Group
from phalanx.spec.cluster_file import as_toml
from phalanx.spec.clusters import memory_bytes
from phalanx.trainer.measure import device_figures
from phalanx.trainer.process import keep_freed_memory
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.rendezvous import exchange
from phalanx.trainer.world import Process, connect

SIZES = tuple(2**power for power in range(12, 25, 2))
"""Bytes of the messages that are timed: 4 KiB to 16 MiB."""

_TIMEOUT_S = 300.0
_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """This process among all: its rank, its place on its machine, the ranks of each machine."""

    rank: int
    machines: tuple[tuple[int, ...], ...]
    device: torch.device

    @property
    def machine(self) -> tuple[int, ...]:
        """The ranks of this process's machine."""
        return next(ranks for ranks in self.machines if self.rank in ranks)

    def groups(self) -> list[Group]:
        """All ranks; those of each machine; and by place on the machine, one rank of each."""
        found = [Group(name="world", ranks=tuple(sorted(rank for ranks in self.machines for rank in ranks)))]
        found += [Group(name="node", ranks=ranks) for ranks in self.machines if len(ranks) > 1]
        if len(self.machines) > 1:
            found += [Group(name="across", ranks=ranks) for ranks in zip(*self.machines, strict=True)]
        return found


def best_s(comm: Comm, call: Callable[[], object], count: int) -> float:
    """Seconds of one `call` of all members of `comm` at once: the best round's, of the slowest member."""
    found = []
    for _ in range(_ROUNDS):
        comm.barrier(purpose="start of round")
        begin = time.perf_counter()
        for _ in range(count):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / count)
    slowest = torch.tensor(found, dtype=torch.float64)
    comm.all_reduce(slowest, op="max", purpose="slowest")
    return float(slowest.min())


def _count(num_bytes: int) -> int:
    return max(2, min(50, (8 << 20) // num_bytes))


def ring(comm: Comm, num_bytes: int, device: torch.device) -> float:
    """Seconds in which every member hands `num_bytes` to the next and takes as many from the one before."""
    sent, taken = (torch.zeros(num_bytes // 4, device=device) for _ in range(2))

    def turn() -> None:
        pending = comm.send(sent, to=(comm.index + 1) % comm.size, channel=0, purpose="ring", async_op=True)
        comm.recv(taken, source=(comm.index - 1) % comm.size, channel=0, purpose="ring")
        pending.wait()

    return best_s(comm, turn, _count(num_bytes))


def all_reduce_curve(comm: Comm, device: torch.device) -> list[list[float]]:
    """(bytes, bus bandwidth as nccl-tests defines it) of an all-reduce over all members of `comm`."""
    curve = []
    for num_bytes in SIZES:
        tensor = torch.zeros(num_bytes // 4, device=device)
        took = best_s(comm, functools.partial(comm.all_reduce, tensor, purpose="sum"), _count(num_bytes))
        curve.append([num_bytes, 2.0 * (comm.size - 1) / comm.size * num_bytes / took])
    return curve


def link(name: str, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Fields of `spec.cluster.Link` for the members of `comm`, all of which talk at once."""
    small, large = ring(comm, SIZES[0], device), ring(comm, SIZES[-1], device)
    rate = (SIZES[-1] - SIZES[0]) / max(large - small, 1e-9)
    return {"name": name, "latency_s": max(0.0, small - SIZES[0] / rate), "bytes_per_s": rate}


def cluster_table(here: Here, figures: Mapping[str, Any], comms: Mapping[str, Comm]) -> dict[str, Any]:
    """The keys of a cluster file. All ranks take part; all get the same links."""
    where = f"measured with torch {torch.__version__} on {time.strftime('%Y-%m-%d')}"
    table: dict[str, Any] = {
        "name": socket.gethostname() if len(here.machines) == 1 else f"{len(here.machines)} machines",
        "num_nodes": len(here.machines),
        "devices_per_node": len(here.machine),
        "device": dict(figures),
        "intra_node": {"name": "none", "latency_s": 0.0, "bytes_per_s": 1e9},
    }
    sources = {f"device.{key}": where for key in figures if key != "name"}
    if "node" in comms:
        table["intra_node"] = {
            **link("inside a machine", comms["node"], here.device),
            "busbw": all_reduce_curve(comms["node"], here.device),
        }
        sources |= {f"intra_node.{key}": where for key in table["intra_node"] if key != "name"}
    if "across" in comms:
        together = link("between machines", comms["across"], here.device)
        comms["world"].barrier(purpose="alone")
        first = here.rank == here.machine[0]
        alone = link("between machines", comms["across"], here.device) if first else together
        comms["world"].barrier(purpose="alone")
        cards = len(here.machine) * together["bytes_per_s"] / alone["bytes_per_s"]
        table |= {"inter_node": together, "nics_per_node": min(len(here.machine), max(1, round(cards)))}
        sources |= {f"inter_node.{key}": where for key in together if key != "name"}
    return {**table, "sources": sources}


def median(all_figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figure by figure, the median over the ranks."""
    found: dict[str, Any] = {}
    for key, value in all_figures[0].items():
        values = [figures[key] for figures in all_figures]
        if isinstance(value, dict):
            found[key] = median(values)
        elif isinstance(value, list):
            found[key] = [statistics.median(column) for column in zip(*values, strict=True)]
        elif isinstance(value, str):
            found[key] = value
        else:
            found[key] = type(value)(statistics.median(values))
    return found


def measure(path: Path) -> None:
    """Measure as one rank of those that were started; the first writes `path`. Raises InputError where machines have
    different numbers of processes or the file cannot be written."""
    keep_freed_memory()
    process = Process.here()
    device = process.take_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    rank, num_ranks = process.rank, process.num_ranks
    if num_ranks == 1:
        here = Here(rank=0, machines=((0,),), device=device)
        table = cluster_table(here, _figures(device, 1), {})
    else:
        store = process.open_store(_TIMEOUT_S)
        names = exchange(store, rank, num_ranks, "host", socket.gethostname(), timeout_s=_TIMEOUT_S)
        machines = tuple(tuple(r for r, name in enumerate(names) if name == host) for host in dict.fromkeys(names))
        if len({len(ranks) for ranks in machines}) > 1:
            raise InputError(
                f"machines with {', '.join(str(len(ranks)) for ranks in machines)} processes",
                instead="as many on each",
            )
        here = Here(rank=rank, machines=machines, device=device)
        comms, neighbours = connect(
            here.groups(),
            rank=rank,
            num_ranks=num_ranks,
            store=dist.PrefixStore("measure", store),
            recorder=Recorder(None),
            timeout_s=_TIMEOUT_S,
            device=device,
            master=(process.address, process.port),
        )
        comms["world"].barrier(purpose="start")
        own = _figures(device, len(here.machine))
        figures = median(exchange(store, rank, num_ranks, "figures", own, timeout_s=_TIMEOUT_S))
        table = cluster_table(here, figures, comms)
        comms["world"].barrier(purpose="end")
        for comm in comms.values():
            comm.close()
        if neighbours:
            neighbours.close()
    if rank == 0:
        try:
            path.write_text(as_toml(table), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}", where="--output") from error


def _figures(device: torch.device, num_local: int) -> dict[str, Any]:
    figures = device_figures(device)
    if device.type == "cpu":
        figures = {"name": "CPU process", "memory_bytes": memory_bytes() // num_local, **figures}
    return figures


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measure(Path(sys.argv[1]))
