"""What a call costs over shared memory and over Gloo: `python benchmarks/comm.py [--ranks 2 4] [--bytes 4096 …]`.

Both take turns in the same processes, so that what else the machine does hits both alike. The figure to trust on a
shared machine is CPU time per call and rank; the best of the rounds is printed. `copy + add` is what two passes over
the data cost at least, in one process with a warm cache.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from phalanx.plan.comm import Comm, Group
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.world import connect
from phalanx.units import format_bytes
from phalanx.watch.events import RingWriter

TRANSPORTS = {"shared memory": True, "Gloo": False}
Best = dict[str, float]


def operations(num_bytes: int, index: int, size: int) -> dict[str, Callable[[Comm], object]]:
    """Every operation on `num_bytes` of payload, as a call on a Comm."""
    length = num_bytes // 4 // size * size
    whole, other, piece = torch.zeros(length), torch.zeros(length), torch.zeros(length // size)

    def ring(comm: Comm) -> None:
        sent = comm.send(whole, to=(index + 1) % size, channel=0, purpose="ring", async_op=True)
        comm.recv(other, source=(index - 1) % size, channel=0, purpose="ring")
        sent.wait()

    return {
        "all_reduce": lambda comm: comm.all_reduce(whole, purpose="sum"),
        "reduce_scatter": lambda comm: comm.reduce_scatter(whole, out=piece, purpose="pieces"),
        "all_gather": lambda comm: comm.all_gather(piece, out=whole, purpose="pieces"),
        "all_to_all": lambda comm: comm.all_to_all(whole, out=other, purpose="exchange"),
        "broadcast": lambda comm: comm.broadcast(whole, root=0, purpose="copy"),
        "send and recv": ring,
        "barrier": lambda comm: comm.barrier(purpose="meet"),
    }


def cpu_s(call: Callable[[], object], count: int) -> float:
    """CPU seconds of this process per call."""
    began_s = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - began_s) / count


def measure(comms: dict[str, Comm], num_bytes: int, rounds: int) -> dict[str, Best]:
    """By operation, and by transport or "copy + add": the best round's CPU seconds per call, mean over ranks."""
    count = max(3, min(200, (32 << 20) // num_bytes))
    some = next(iter(comms.values()))
    best: dict[str, Best] = {}
    for name, operation in operations(num_bytes, some.index, some.size).items():
        for _ in range(rounds):
            for transport, comm in comms.items():
                comm.barrier(purpose="start of round")
                spent = torch.tensor([cpu_s(lambda: operation(comm), count)], dtype=torch.float64)  # noqa: B023
                comm.all_reduce(spent, purpose="result")
                entry = best.setdefault(name, {})
                entry[transport] = min(entry.get(transport, float("inf")), spent.item() / some.size)
    one, two = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
    for entry in best.values():
        entry["copy + add"] = min(cpu_s(lambda: two.copy_(one).add_(one), count) for _ in range(rounds))
    return best


def rank_main(rank: int, size: int, folder: Path, sizes: Sequence[int], rounds: int) -> None:
    """One rank: measure; rank 0 prints."""
    torch.set_num_threads(1)
    group = Group(name="benchmark", ranks=tuple(range(size)))
    recorder = Recorder(RingWriter(folder / f"{rank}.ring", rank=rank))
    comms: dict[str, Comm] = {}
    left = []
    for transport, shared_memory in TRANSPORTS.items():
        own, neighbours = connect(
            [group],
            rank=rank,
            num_ranks=size,
            store=dist.FileStore(str(folder / transport), size),
            recorder=recorder,
            timeout_s=120,
            shared_memory=shared_memory,
        )
        comms[transport] = own[group.name]
        left.append(neighbours)
    for num_bytes in sizes:
        best = measure(comms, num_bytes, rounds)
        if rank == 0:
            show(best, num_bytes, size)
    comms["Gloo"].barrier(purpose="end")


def show(best: dict[str, Best], num_bytes: int, size: int) -> None:
    """Print one table."""
    table = Table(
        "operation", *TRANSPORTS, "copy + add", title=f"{size} ranks, {format_bytes(num_bytes)}: CPU µs per call"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, entry in best.items():
        table.add_row(name, *(f"{entry[column] * 1e6:.0f}" for column in (*TRANSPORTS, "copy + add")))
    Console(width=100).print(table)


def run(size: int, sizes: Sequence[int], rounds: int) -> int:
    """Fork the ranks of one measurement; returns how many failed."""
    with TemporaryDirectory() as folder:
        pids = []
        for rank in range(size):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rank_main(rank, size, Path(folder), sizes, rounds)
                    sys.stdout.flush()
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=[4 << 10, 1 << 20, 8 << 20])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    return int(any(run(size, given.bytes, given.rounds) for size in given.ranks))


if __name__ == "__main__":
    sys.exit(main())
