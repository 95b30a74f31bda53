"""The seconds that overlap hides between two hosts, axis by axis: `python benchmarks/overlap.py` (root, `ip`, `tc`).

Two hosts of `benchmarks/hosts.py` train one small model; each case has a link on which its messages take about as long
as half its compute. Contenders take turns, round by round; the best step of each counts, since other programs only ever
make one slower. "without" has `overlap = false` in its layout; "fast link" is what a step takes where messages take no
time: the share is what was hidden of all that could be.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from crew import Contender, Steps, take_turn
from here import LLAMA, engine_of, plan_here
from hosts import Hosts, hosts, why_not
from rich.console import Console
from rich.table import Table

from phalanx.plan.layout import Layout
from phalanx.spec.job import JobSpec
from phalanx.trainer.engine import Engine
from phalanx.trainer.recorder import Recorder
from phalanx.units import format_seconds

JOB = JobSpec(global_batch=8, seq_len=256, num_steps=1000, precision="fp32")
FAST = 40e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of overlap: `layout` on two hosts, with one rank each unless it has four."""

    name: str
    layout: Layout
    bits_per_s: float


CASES = (
    Case(name="gradients, data 2", layout=Layout(data=2, micro_batch=4, bucket_bytes=2**20), bits_per_s=400e6),
    Case(
        name="gradients and parameters, ZeRO 1",
        layout=Layout(data=2, micro_batch=4, zero=1, bucket_bytes=2**20),
        bits_per_s=400e6,
    ),
    Case(name="gradients, ZeRO 2", layout=Layout(data=2, micro_batch=4, zero=2), bits_per_s=200e6),
    Case(name="gradients and parameters, ZeRO 3", layout=Layout(data=2, micro_batch=4, zero=3), bits_per_s=300e6),
    Case(name="pipeline 2, 1F1B", layout=Layout(pipeline=2, micro_batch=1), bits_per_s=100e6),
    Case(name="tensor 2", layout=Layout(tensor=2, micro_batch=4), bits_per_s=800e6),
    Case(name="tensor 2, 2 chunks", layout=Layout(tensor=2, micro_batch=4, tensor_overlap_chunks=2), bits_per_s=800e6),
    Case(name="tensor 2, 4 chunks", layout=Layout(tensor=2, micro_batch=4, tensor_overlap_chunks=4), bits_per_s=800e6),
    Case(
        name="tensor 2, sequence parallel",
        layout=Layout(tensor=2, micro_batch=4, sequence_parallel=True),
        bits_per_s=800e6,
    ),
    Case(
        name="tensor 2, sequence parallel, 4 chunks",
        layout=Layout(tensor=2, micro_batch=4, sequence_parallel=True, tensor_overlap_chunks=4),
        bits_per_s=800e6,
    ),
)
BOTH = Layout(tensor=2, data=2, micro_batch=4, bucket_bytes=2**20)


def contender(name: str, layout: Layout, network: Hosts, host_of: Sequence[int] = (0, 1)) -> Contender:
    """This trainer with `layout` on the hosts of `network`; rank i runs on host `host_of[i]`."""
    plan = plan_here(LLAMA, JOB, layout)

    def steps(rank: int, folder: Path) -> Steps:
        network.enter(host_of[rank])
        recorder = Recorder()
        with engine_of(plan, rank, folder, recorder, master=(network.addresses[0], 1)) as engine:
            tokens = torch.randint(0, LLAMA.vocab, (JOB.global_batch // layout.data, JOB.seq_len))
            batches = engine.micro_batches(tokens, tokens, JOB.tokens_per_step, 0)
            while True:
                before = dict(recorder.seconds)
                step(engine, batches)
                yield {kind: seconds - before.get(kind, 0.0) for kind, seconds in recorder.seconds.items()}

    return Contender(name=name, num_ranks=layout.num_ranks, steps=steps)


def step(engine: Engine, batches: Sequence[Any]) -> None:
    """What `trainer.loop` does in a step, without its report."""
    loss = engine.forward_backward(batches)
    engine.synchronize()
    engine.totals(loss)
    engine.update(1e-4, 1.0)


@contextlib.contextmanager
def networks(rates: Sequence[float]) -> Iterator[dict[float, Hosts]]:
    """Two hosts for each rate."""
    with contextlib.ExitStack() as stack:
        yield {rate: stack.enter_context(hosts(2, bits_per_s=rate)) for rate in dict.fromkeys(rates)}


def best(contenders: Sequence[Contender], num_rounds: int, num_steps: int, console: Console) -> dict[str, float]:
    """Seconds of the best step of each."""
    found: dict[str, float] = {}
    for number in range(num_rounds):
        for one in contenders:
            with console.status(f"round {number + 1} of {num_rounds}: {one.name}"):
                wall_s = take_turn(one, num_steps).wall_s
            found[one.name] = min(wall_s, found.get(one.name, wall_s))
    return found


def measure(cases: Sequence[Case], num_rounds: int, num_steps: int, console: Console) -> Table:
    """Each case with and without overlap, and where messages take no time."""
    columns = ("link", "fast link", "without", "with", "hidden", "share")
    table = Table(
        "overlap", *columns, title="One step, 3.9 M parameters, 2,048 tokens, two hosts", title_justify="left"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    with networks([*(case.bits_per_s for case in cases), FAST]) as links:
        for case in cases:
            link = links[case.bits_per_s]
            trio = [
                contender("fast", case.layout, links[FAST]),
                contender("without", replace(case.layout, overlap=False), link),
                contender("with", case.layout, link),
            ]
            times = best(trio, num_rounds, num_steps, console)
            hidden, all_of_it = times["without"] - times["with"], times["without"] - times["fast"]
            rate = f"{case.bits_per_s / 1e6:,.0f} Mbit/s"
            seconds = (format_seconds(times[name]) for name in ("fast", "without", "with"))
            table.add_row(case.name, rate, *seconds, format_seconds(hidden), f"{hidden / all_of_it:.0%}")
    return table


def compare_placements(num_rounds: int, num_steps: int, console: Console) -> Table:
    """Tensor inside hosts and data across, and the reverse."""
    table = Table("placement", "step", title="tensor 2 × data 2 on two hosts of two ranks", title_justify="left")
    rate = 100e6
    with hosts(2, bits_per_s=rate) as network:
        inside = contender("tensor inside hosts, data across", BOTH, network, (0, 0, 1, 1))
        across = contender("data inside hosts, tensor across", BOTH, network, (0, 1, 0, 1))
        chunks = replace(BOTH, tensor_overlap_chunks=4)
        hidden = contender("the same, tensor in 4 chunks", chunks, network, (0, 1, 0, 1))
        for name, seconds in best([inside, across, hidden], num_rounds, num_steps, console).items():
            table.add_row(f"{name}, {rate / 1e6:,.0f} Mbit/s", format_seconds(seconds))
    return table


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", metavar="WORD", help="only cases whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    reason = why_not()
    if reason:
        sys.stderr.write(f"overlap: {reason}\n")
        return 2
    console = Console(width=120)
    words = given.cases or [""]
    cases = [case for case in CASES if any(word in case.name for word in words)]
    if cases:
        console.print(measure(cases, given.rounds, given.steps, console))
    if not given.cases or "placement" in given.cases:
        console.print(compare_placements(given.rounds, given.steps, console))
    return 0


if __name__ == "__main__":
    sys.exit(main())
