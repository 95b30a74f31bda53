"""Saving and loading against plain files and torch's distributed checkpoints: `python benchmarks/checkpoint.py FOLDER`.

Two ranks hold about 400 MB of weights and moments under ZeRO 1. Each round does everything once, on the disk of FOLDER,
so that what else the machine does hits all alike; files are taken out of the page cache before they are read. Ratios
are of times within one round, and the median of the rounds is held against the aims; the exit code is 1 if one is
missed by more than 5 %.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.store import load
from phalanx.plan.groups import groups
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.spec.cluster import ClusterSpec, Device, Link
from phalanx.spec.job import CheckpointSpec, JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.trainer.engine import Engine
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.state import StatePiece, state
from phalanx.trainer.world import World, connect

NUM_RANKS = 2
LAYOUT = Layout(data=NUM_RANKS, zero=1)
MODEL = ModelSpec(
    name="benchmark",
    num_layers=8,
    hidden=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn=1536,
    vocab=8192,
    max_seq_len=256,
    norm="rmsnorm",
    activation="swiglu",
    positions="rope",
    tied=False,
)
CHUNK_BYTES = 2**20

AIMS = {
    "save: ours / plain files": 1 / 0.9,
    "load: ours / plain files": 1 / 0.8,
    "save: ours / torch": 1.0,
    "load: ours / torch": 1.0,
    "stall in the background / one copy": 1.3,
}
"""Seconds over seconds; those of plain files are turned round below, so that less is better everywhere."""


def plan() -> Plan:
    device = Device(name="none", memory_bytes=2**34, memory_bytes_per_s=1e10, flops_per_s={"fp32": 1e11})
    link = Link(name="none", latency_s=1e-5, bytes_per_s=1e9)
    cluster = ClusterSpec(
        name="none", num_nodes=1, devices_per_node=NUM_RANKS, device=device, intra_node=link, inter_node=link
    )
    job = JobSpec(
        global_batch=2, seq_len=256, num_steps=1, precision="fp32", checkpoint=CheckpointSpec(keep=0, resume="never")
    )
    return Plan(model=MODEL, cluster=cluster, job=job, layout=LAYOUT)


class Bench:
    """One rank. `timed(name, act)` keeps the seconds until all ranks have done `act`."""

    def __init__(self, rank: int, folder: Path) -> None:
        store = dist.FileStore(str(folder / "store"), NUM_RANKS)
        dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=NUM_RANKS)
        comms, _ = connect(
            groups(MODEL, LAYOUT), rank=rank, num_ranks=NUM_RANKS, store=store, recorder=Recorder(), timeout_s=300.0
        )
        world = World(rank=rank, layout=LAYOUT, device=torch.device("cpu"), recorder=Recorder(), comms=comms)
        self.rank, self.folder, self.world = rank, folder, world.comm("world")
        self.plan = plan()
        self.pieces = list(state(Engine(self.plan, world.coord, world.comm, world.device)))
        self.owned = [piece for piece in self.pieces if piece.owned]
        self.saver = Saver(RunDir(folder), self.plan, self.pieces, self.world, say=lambda line: None)
        self.tensors = _distributed(self.owned)
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, act: Callable[[], object]) -> None:
        self.world.barrier(purpose="begin")
        since_s = time.perf_counter()
        act()
        self.world.barrier(purpose="end")
        self.seconds.setdefault(name, []).append(time.perf_counter() - since_s)

    def round(self, number: int) -> None:
        """Save and load each way, then look at how long a save in the background holds up the rank."""
        plain, torch_s = self.folder / f"plain-{number}-{self.rank}", self.folder / f"torch-{number}"
        ours = RunDir(self.folder).checkpoint(number)
        self.timed("save plain", lambda: write_plain(plain, self.owned))
        self.timed("save ours", lambda: self.saver.save(number, {}))
        self.timed("save torch", lambda: dcp.save(self.tensors, storage_writer=dcp.FileSystemWriter(torch_s)))
        for path in (plain, *ours.iterdir(), *torch_s.iterdir()):
            forget(path)
        self.timed("load plain", lambda: read_plain(plain, self.owned))
        self.timed("load ours", lambda: load(ours, self.plan, self.pieces, self.world))
        self.timed("load torch", lambda: dcp.load(self.tensors, storage_reader=dcp.FileSystemReader(torch_s)))
        copies = [torch.zeros_like(piece.tensor) for piece in self.owned]
        self.timed("copy", lambda: [copy.copy_(piece.tensor) for copy, piece in zip(copies, self.owned, strict=True)])
        self.timed("stall", lambda: self.saver.save(1000 + number, {}, background=True))
        self.saver.wait()
        self.world.barrier(purpose="done")
        if self.rank == 0:
            for path in (ours, torch_s, RunDir(self.folder).checkpoint(1000 + number)):
                shutil.rmtree(path)
        plain.unlink()


def _distributed(pieces: Sequence[StatePiece]) -> dict[str, DTensor]:
    """The same bytes as torch's distributed tensors: 16 on each rank, cut evenly."""
    flat = torch.cat([piece.tensor.view(-1) for piece in pieces])
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    return {
        f"tensor{index}": DTensor.from_local(part.clone(), mesh, [Shard(0)])
        for index, part in enumerate(flat[: flat.numel() // 16 * 16].chunk(16))
    }


def write_plain(path: Path, pieces: Sequence[StatePiece]) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            data = memoryview(piece.tensor.view(-1).view(torch.uint8).numpy())
            for first in range(0, len(data), CHUNK_BYTES):
                file.write(data[first : first + CHUNK_BYTES])
        os.fsync(file.fileno())


def read_plain(path: Path, pieces: Sequence[StatePiece]) -> None:
    with path.open("rb", buffering=0) as file:
        for piece in pieces:
            data = memoryview(piece.tensor.view(-1).view(torch.uint8).numpy())
            for first in range(0, len(data), CHUNK_BYTES):
                file.readinto(data[first : first + CHUNK_BYTES])


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """By aim, one ratio per round. The first round warms up (memory, torch's caches) and does not count."""
    pairs = {
        "save: ours / plain files": ("save ours", "save plain"),
        "load: ours / plain files": ("load ours", "load plain"),
        "save: ours / torch": ("save ours", "save torch"),
        "load: ours / torch": ("load ours", "load torch"),
        "stall in the background / one copy": ("stall", "copy"),
    }
    return {
        name: [a / b for a, b in zip(seconds[upper][1:], seconds[lower][1:], strict=True)]
        for name, (upper, lower) in pairs.items()
    }


def rank_main(rank: int, folder: Path, num_rounds: int) -> dict[str, list[float]]:
    bench = Bench(rank, folder)
    for number in range(1, num_rounds + 2):
        bench.round(number)
    if rank == 0:
        print(f"{bench.saver.num_bytes / 1e6:,.0f} MB over {NUM_RANKS} ranks", flush=True)
    return bench.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write, on the disk in question")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with TemporaryDirectory(dir=arguments.folder) as folder:
        result = Path(folder) / "seconds.json"
        children = []
        for rank in range(NUM_RANKS):
            child = os.fork()
            if child == 0:
                seconds = rank_main(rank, Path(folder), arguments.rounds)
                if rank == 0:
                    result.write_text(json.dumps(seconds))
                sys.stdout.flush()
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            return 3
        seconds = json.loads(result.read_text())
    table = Table("seconds over seconds", "median", "rounds", "at most", box=None)
    missed = False
    for name, values in ratios(seconds).items():
        median = statistics.median(values)
        missed |= median > AIMS[name] * 1.05
        table.add_row(name, f"{median:.2f}", " ".join(f"{value:.2f}" for value in values), f"{AIMS[name]:.2f}")
    Console().print(table)
    print({name: round(statistics.median(values[1:]), 3) for name, values in seconds.items()})
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
