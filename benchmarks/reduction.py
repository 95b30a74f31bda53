"""Step time and final loss of each kind of gradient reduction on a slow link: `python benchmarks/reduction.py` (root,
`ip`, `tc`).

Two hosts of `benchmarks/hosts.py`, one rank each, train a small model of bytes on the sources of this Python, all from
the same weights on the same data. The step time is that of the best step, the loss the mean over the last ten; "sent"
is what Traffic claims of gradients, per step and rank.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from crew import Contender, Steps, take_turn
from here import LLAMA, plan_here
from hosts import Hosts, hosts, why_not
from overlap import FAST
from rich.console import Console
from rich.table import Table

from phalanx.plan.layout import Coord, Layout
from phalanx.plan.plan import Plan
from phalanx.plan.traffic import traffic
from phalanx.rundir import RunDir
from phalanx.spec.job import JobSpec, OptimizerSpec
from phalanx.trainer.engine import Engine
from phalanx.trainer.model import MicroBatch
from phalanx.trainer.optim import clip_coefficient
from phalanx.trainer.process import keep_freed_memory
from phalanx.trainer.world import join
from phalanx.units import format_bytes, format_seconds

MODEL = replace(LLAMA, name="bytes", hidden=128, num_heads=4, num_kv_heads=4, ffn=384, vocab=256, max_seq_len=128)
RATE = 3e-3
JOB = JobSpec(global_batch=8, seq_len=128, num_steps=1000, precision="fp32", optimizer=OptimizerSpec(lr=RATE))

PLAIN = Layout(data=2, micro_batch=4, bucket_bytes=2**20)
KINDS = (
    PLAIN,
    Layout(data=2, micro_batch=4, bucket_bytes=2**20, reduce="bf16"),
    Layout(data=2, micro_batch=4, bucket_bytes=2**20, reduce="fp16"),
    Layout(data=2, micro_batch=4, bucket_bytes=2**20, reduce="powersgd", reduce_rank=4),
    Layout(data=2, micro_batch=4, bucket_bytes=2**20, reduce="powersgd", reduce_rank=16),
    Layout(data=2, micro_batch=4, bucket_bytes=2**20, reduce="top-k", reduce_fraction=0.01),
    Layout(data=2, micro_batch=4, bucket_bytes=2**20, reduce="top-k", reduce_fraction=0.1),
)


def name_of(layout: Layout) -> str:
    """As "powersgd, rank 4"."""
    more = {"powersgd": f", rank {layout.reduce_rank}", "top-k": f", {layout.reduce_fraction:g} of all"}
    return layout.reduce + more.get(layout.reduce, "")


def plan_of(layout: Layout) -> Plan:
    """A plan for both hosts."""
    return plan_here(MODEL, JOB, layout, num_nodes=2)


def text() -> torch.Tensor:
    """A few megabytes of Python, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def batches_of(engine: Engine, content: torch.Tensor, number: int) -> list[MicroBatch]:
    """This rank's part of global batch `number`."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(content) - JOB.seq_len - 1, (JOB.global_batch,), generator=generator)
    samples = torch.stack([content[start : start + JOB.seq_len + 1] for start in starts[list(engine.positions)]])
    return engine.micro_batches(samples[:, :-1].contiguous(), samples[:, 1:].contiguous(), JOB.tokens_per_step, number)


def step(engine: Engine, batches: list[MicroBatch]) -> float:
    """One optimizer step; returns its loss."""
    share = engine.forward_backward(batches)
    engine.synchronize()
    loss, norm, _ = engine.totals(share)
    engine.update(RATE, clip_coefficient(norm, 1.0))
    return loss


def contender(layout: Layout, network: Hosts, losses: Path) -> Contender:
    """This trainer with `layout` on both hosts; rank 0 writes the losses of its steps to `losses`."""
    plan = plan_of(layout)

    def steps(rank: int, folder: Path) -> Steps:
        keep_freed_memory()
        network.become(rank, layout.num_ranks)
        world = join(plan, RunDir(folder))
        engine, content, seen = Engine(plan, world.coord, world.comm, world.device), text(), []
        while True:
            seen.append(step(engine, batches_of(engine, content, len(seen))))
            if rank == 0:
                losses.write_text(json.dumps(seen))
            yield {}

    return Contender(name=name_of(layout), num_ranks=layout.num_ranks, steps=steps)


def main() -> int:
    """Measure each kind and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--bits-per-s", type=float, default=100e6)
    given = parser.parse_args()
    reason = why_not()
    if reason:
        sys.stderr.write(f"reduction: {reason}\n")
        return 2
    console = Console(width=100)
    title = f"{MODEL.num_parameters / 1e6:.2f} M parameters, {given.steps} steps, {given.bits_per_s / 1e6:,.0f} Mbit/s"
    table = Table("reduction", "sent", "step", "final loss", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    with (
        hosts(2, bits_per_s=given.bits_per_s) as slow,
        hosts(2, bits_per_s=FAST) as fast,
        TemporaryDirectory() as folder,
    ):
        losses = Path(folder) / "losses.json"
        for layout, network in ((PLAIN, fast), *((layout, slow) for layout in KINDS)):
            name = name_of(layout) + (", fast link" if network is fast else "")
            with console.status(name):
                turn = take_turn(contender(layout, network, losses), given.steps)
            last = statistics.fmean(json.loads(losses.read_text())[-10:])
            sent = sum(each.payload_bytes for each in traffic(plan_of(layout), Coord()) if each.group == "data")
            table.add_row(name, format_bytes(sent), format_seconds(turn.wall_s), f"{last:.3f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
