"""Does balancing stages by cost pay? `python benchmarks/stage_balance.py`: a model with a large vocabulary on two
pipeline ranks, its layers split evenly, split by hand, and as the trainer does unless told otherwise.

The figure to trust on a busy machine is the CPU seconds of the slowest stage: a pipeline step cannot be shorter. Splits
take turns, round by round; of each the best step counts, since other programs only ever make one slower.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from crew import Contender, Steps, take_turn
from here import LLAMA, engine_of, plan_here
from rich.console import Console
from rich.table import Table

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.stages import Stage, split, stage_costs
from phalanx.spec.job import JobSpec
from phalanx.trainer.recorder import Recorder
from phalanx.units import format_seconds

MODEL = replace(
    LLAMA,
    name="large vocabulary",
    num_layers=8,
    hidden=384,
    num_heads=6,
    num_kv_heads=6,
    head_dim=64,
    ffn=1024,
    vocab=32_000,
)
JOB = JobSpec(global_batch=4, seq_len=256, num_steps=1000, precision="fp32")
STAGES = 2


def plan_of(stage_layers: tuple[int, ...] | None) -> Plan:
    """A plan with these layers on its stages, or as many as the trainer gives them."""
    return plan_here(MODEL, JOB, Layout(pipeline=STAGES, stage_layers=stage_layers))


def contender(name: str, plan: Plan, told: Path) -> Contender:
    """The trainer with this plan. Each rank appends the CPU seconds of each step's forwards and backwards to a file in
    `told`: waiting is none of them, since ranks sleep until a message comes."""

    def steps(rank: int, folder: Path) -> Steps:
        with engine_of(plan, rank, folder, Recorder()) as engine:
            tokens = torch.randint(0, MODEL.vocab, (JOB.global_batch, JOB.seq_len))
            batches = engine.micro_batches(tokens, tokens, JOB.tokens_per_step, 0)
            while True:
                before_s = time.process_time()
                loss = engine.forward_backward(batches)
                with (told / f"{name}-{rank}").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(time.process_time() - before_s) + "\n")
                engine.synchronize()
                engine.totals(loss)
                engine.update(1e-4, 1.0)
                yield {}

    return Contender(name=name, num_ranks=STAGES, steps=steps)


def cpu_s(told: Path, name: str) -> list[float]:
    """CPU seconds of each stage in its best step."""
    files = [(told / f"{name}-{rank}").read_text(encoding="utf-8").splitlines() for rank in range(STAGES)]
    return [min(map(json.loads, lines)) for lines in files]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if balancing by cost does not win."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of each turn, after one to warm up")
    given = parser.parse_args(arguments)
    even = MODEL.num_layers // STAGES
    splits = {"equal counts": (even, even), "by hand": (even + 2, even - 2), "by cost": None}
    plans = {name: plan_of(stage_layers) for name, stage_layers in splits.items()}
    walls: dict[str, float] = {}
    console = Console()
    with TemporaryDirectory() as folder:
        for number in range(given.rounds):
            for name, plan in plans.items():
                with console.status(f"round {number + 1} of {given.rounds}: {name}"):
                    wall_s = take_turn(contender(name, plan, Path(folder)), given.steps).wall_s
                walls[name] = min(wall_s, walls.get(name, wall_s))
        busy = {name: cpu_s(Path(folder), name) for name in plans}
    table = Table("split", "layers", "CPU s by stage", "slowest", "ratio", "claimed", "step", "ratio")
    base, base_cost = max(busy["equal counts"]), max(costs(plans["equal counts"]))
    for name, plan in plans.items():
        slowest = max(busy[name])
        table.add_row(
            name,
            ", ".join(str(len(stage.layers)) for stage in stages(plan)),
            ", ".join(f"{seconds:.3f}" for seconds in busy[name]),
            format_seconds(slowest),
            f"{slowest / base:.2f}",
            f"{max(costs(plan)) / base_cost:.2f}",
            format_seconds(walls[name]),
            f"{walls[name] / walls['equal counts']:.2f}",
        )
    console.print(table)
    sizes = f"{MODEL.num_layers} layers of width {MODEL.hidden}, vocabulary {MODEL.vocab:,}"
    batch = f"{JOB.global_batch} micro-batches of {JOB.seq_len} tokens"
    console.print(f"{sizes}; {batch}; 1F1B. claimed: the ratio of costs that the split is made by")
    return 0 if max(busy["by cost"]) < base else 1


def stages(plan: Plan) -> tuple[Stage, ...]:
    """The stages of a plan."""
    return split(MODEL, JOB.seq_len, STAGES, plan.layout.stage_layers)


def costs(plan: Plan) -> tuple[int, ...]:
    """What the split takes each stage to cost."""
    return stage_costs(MODEL, JOB.seq_len, stages(plan))


if __name__ == "__main__":
    sys.exit(main())
