"""Saving and loading against plain files and torch's distributed checkpoints: `python benchmarks/checkpoint.py FOLDER`.

Two ranks hold about 400 MB of weights and moments under ZeRO 1. Each round does everything once, on the disk of FOLDER,
so that what else the machine does hits all alike; files are taken out of the page cache before they are read. The
quickest rounds, which other programs disturbed least, are held against the aims; the median of the ratios within one
round stands beside. The first round warms up and does not count. The exit code is 1 if an aim is missed by more than
5 %.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from here import LLAMA, plan_here
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.store import load
from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.plan.groups import groups
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.spec.job import CheckpointSpec, JobSpec
from phalanx.trainer.engine import Engine
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.state import state
from phalanx.trainer.world import World, connect

NUM_RANKS = 2
LAYOUT = Layout(data=NUM_RANKS, zero=1)
MODEL = replace(LLAMA, num_layers=8, hidden=512, head_dim=64, ffn=1536, vocab=8192)
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
    checkpoint = CheckpointSpec(keep=0, resume="never")
    job = JobSpec(global_batch=2, seq_len=256, num_steps=1, precision="fp32", checkpoint=checkpoint)
    return plan_here(MODEL, job, LAYOUT)


class Bench:
    """One rank. `timed(name, act)` keeps the seconds until all ranks have done `act`, this rank's CPU seconds, and how
    many bytes its resident memory rose meanwhile at most."""

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
        self.taken: dict[str, list[tuple[float, float, int]]] = {}

    def timed(self, name: str, act: Callable[[], object]) -> None:
        self.world.barrier(purpose="begin")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of resident memory
        before, since_s, cpu_since_s = _memory("VmRSS"), time.perf_counter(), time.process_time()
        act()
        cpu_s, peak_bytes = time.process_time() - cpu_since_s, _memory("VmHWM") - before
        self.world.barrier(purpose="end")
        wall_s = time.perf_counter() - since_s
        self.taken.setdefault(name, []).append((wall_s, cpu_s, peak_bytes))

    def round(self, number: int) -> None:
        """Save and load each way, then look at how long a save in the background holds up the rank."""
        plain, torch_s = self.folder / f"plain-{number}-{self.rank}", self.folder / f"torch-{number}"
        ours = RunDir(self.folder).checkpoint(number)
        self.timed("save plain", lambda: write_plain(plain, self.owned))
        self.timed("save ours", lambda: self.saver.save(number, {}))
        self.timed("save torch", lambda: dcp.save(self.tensors, storage_writer=dcp.FileSystemWriter(torch_s)))
        loads: list[tuple[str, list[Path], Callable[[], object]]] = [
            ("load plain", [plain], lambda: read_plain(plain, self.owned)),
            ("load ours", [*ours.iterdir()], lambda: load(ours, self.plan, self.pieces, self.world)),
            (
                "load torch",
                [*torch_s.iterdir()],
                lambda: dcp.load(self.tensors, storage_reader=dcp.FileSystemReader(torch_s)),
            ),
        ]
        for name, paths, act in random.Random(number).sample(loads, len(loads)):
            act()  # a virtual machine gets memory for its page cache slowly, the first time
            for path in paths:
                forget(path)
            self.timed(name, act)
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


def _memory(key: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{key}:")[1].split()[0]) * 1024


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


PAIRS = {
    "save: ours / plain files": ("save ours", "save plain"),
    "load: ours / plain files": ("load ours", "load plain"),
    "save: ours / torch": ("save ours", "save torch"),
    "load: ours / torch": ("load ours", "load torch"),
    "stall in the background / one copy": ("stall", "copy"),
}


def rank_main(rank: int, folder: Path, num_rounds: int) -> dict[str, list[tuple[float, float, int]]]:
    bench = Bench(rank, folder)
    for number in range(1, num_rounds + 2):
        bench.round(number)
    if rank == 0:
        print(f"{bench.saver.num_bytes / 1e6:,.0f} MB over {NUM_RANKS} ranks", flush=True)
    return bench.taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write, on the disk in question")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    with TemporaryDirectory(dir=arguments.folder) as folder:
        result = Path(folder) / "taken.json"
        children = []
        for rank in range(NUM_RANKS):
            child = os.fork()
            if child == 0:
                taken = rank_main(rank, Path(folder), arguments.rounds)
                if rank == 0:
                    result.write_text(json.dumps(taken))
                sys.stdout.flush()
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            return 3
        taken = json.loads(result.read_text())
    return show(taken)


def show(taken: dict[str, list[list[float]]]) -> int:
    """Print what was taken; returns the exit code."""
    table = Table("seconds over seconds", "quickest", "median", "at most", box=None)
    missed = False
    for name, (upper, lower) in PAIRS.items():
        ours, theirs = ([wall_s for wall_s, _, _ in taken[which][1:]] for which in (upper, lower))
        quickest = min(ours) / min(theirs)
        median = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        missed |= quickest > AIMS[name] * 1.05
        table.add_row(name, f"{quickest:.2f}", f"{median:.2f}", f"{AIMS[name]:.2f}")
    Console().print(table)
    table = Table("medians", "seconds", "CPU seconds of rank 0", "most memory on top, MB", box=None)
    for name, rounds in taken.items():
        wall_s, cpu_s, _ = (statistics.median(values) for values in zip(*rounds[1:], strict=True))
        peak_bytes = max(peak for _, _, peak in rounds)
        table.add_row(name, f"{wall_s:.3f}", f"{cpu_s:.3f}", f"{peak_bytes / 1e6:.0f}")
    Console().print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
