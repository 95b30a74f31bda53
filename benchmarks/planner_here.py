"""Predicted against measured step times of this machine: `phalanx measure -o cluster.toml`, then `python
benchmarks/planner_here.py cluster.toml`.

Layouts of as many ranks as the cluster file has devices train the small model of step_time.py in turns; what counts is
each one's fastest step. Prints both times, their ratio, and whether the order is right. Needs a machine without other
load: where a rank's CPU seconds are far below its step's, others took the cores. Exit code 1 if the layout that
is predicted to be fastest is measured to be more than 5 % slower than the fastest.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from crew import Turn, take_turn
from planner_accuracy import ranks
from rich.console import Console
from rich.table import Table
from step_time import GLOBAL_BATCH, MODEL, SEQ_LEN, ours

from phalanx.data.tokens import TokenWriter
from phalanx.plan.layout import Layout
from phalanx.planner.advice import step_s
from phalanx.planner.search import predict
from phalanx.spec import clusters
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.document import read
from phalanx.spec.job import JobSpec
from phalanx.spec.schema import Checker

TOLERANCE = 0.05


def layouts(size: int) -> list[Layout]:
    """Some of `size` ranks that differ in what they cost: each axis alone, large and small micro-batches."""
    return [
        Layout(data=size, micro_batch=4),
        Layout(data=size, zero=1, micro_batch=1),
        Layout(pipeline=size, micro_batch=4),
        Layout(pipeline=size, micro_batch=1),
        Layout(tensor=size, micro_batch=8),
        Layout(tensor=size, micro_batch=1),
        Layout(tensor=size, micro_batch=4, sequence_parallel=True, recompute="full"),
    ]


def cluster_of(path: Path) -> ClusterSpec:
    """The cluster file at `path`."""
    check = Checker(read(path))
    cluster = clusters.build(check, check.document.table, ())
    check.finish()
    assert cluster is not None, "finish raises what is wrong"
    return cluster


def measured(chosen: list[Layout], num_rounds: int, num_steps: int, console: Console) -> list[Turn]:
    """The turn with the fastest step of each layout."""
    turns: dict[int, Turn] = {}
    with TemporaryDirectory() as folder:
        data = Path(folder) / "tokens"
        with TokenWriter(data, np.uint16) as writer:
            writer.add(np.random.default_rng(0).integers(0, MODEL.vocab, 64 * GLOBAL_BATCH * SEQ_LEN, dtype=np.uint16))
            writer.end_document()
        for number in range(num_rounds):
            for at, layout in enumerate(chosen):
                with console.status(f"round {number + 1} of {num_rounds}: {layout}"):
                    turn = take_turn(ours(str(layout), layout, data), num_steps)
                turns[at] = min(turn, turns.get(at, turn), key=lambda turn: turn.wall_s)
    return [turns[at] for at in range(len(chosen))]


def main() -> int:
    """Predict, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", type=Path, help="what phalanx measure wrote")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each layout (default 3)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a turn (default 3)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a process with idle threads must not be forked
    cluster = cluster_of(given.cluster)
    chosen = layouts(cluster.devices_per_node)
    job = JobSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, num_steps=1, precision="fp32")
    predicted = [step_s(predict(MODEL, job, cluster, layout)) for layout in chosen]
    turns = measured(chosen, given.rounds, given.steps, Console(stderr=True))
    real = [turn.wall_s for turn in turns]
    columns = ("layout", "predicted s", "measured s", "ratio", "CPU s per rank")
    table = Table(*columns, title="One optimizer step", title_justify="left")
    for at in np.argsort(real):
        times = (predicted[at], real[at], predicted[at] / real[at], turns[at].cpu_s / chosen[at].num_ranks)
        table.add_row(str(chosen[at]), *(f"{value:.2f}" for value in times))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    spearman = float(np.corrcoef(ranks(predicted), ranks(real))[0, 1])
    loss = real[int(np.argmin(predicted))] / min(real) - 1.0
    console.print(f"Spearman {spearman:.2f}; the layout predicted to be fastest is {loss:.1%} slower than the fastest")
    return int(loss > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
