"""What ZeRO and recomputation save, in resident memory and as the planner claims it: `python benchmarks/memory.py`.

Each rank notes its resident memory before anything of the model exists, and its highest while it takes some steps. The
difference is held against the planner's bytes of the same layout; and what each layout saves against the first of its
kind, against what the planner says that it saves. The exit code is 1 if a saving of more than 5 % of a rank's memory is
missed by more than a tenth of that memory.

The kernel counts memory by the page and an allocator keeps what it was given, so measured is more than claimed by what
cannot be packed; libraries add some megabytes at the first step.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import here
import torch
from crew import Contender, Steps, take_turn
from rich.console import Console
from rich.table import Table

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.planner.search import predict
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec
from phalanx.trainer.recorder import Recorder

STATES = replace(
    here.LLAMA, name="mostly states", num_layers=8, hidden=512, head_dim=64, ffn=1536, vocab=8192, max_seq_len=128
)
ACTIVATIONS = replace(
    here.LLAMA,
    name="mostly activations",
    num_layers=8,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    vocab=2048,
    max_seq_len=1024,
)
ZERO = {f"ZeRO {zero}": Layout(data=4, zero=zero) for zero in range(4)}
ZERO_OF_2 = {f"ZeRO {zero}": Layout(data=2, zero=zero) for zero in range(4)}
RECOMPUTE = {
    "none": Layout(micro_batch=2),
    "selective": Layout(micro_batch=2, recompute="selective"),
    "full, every 2": Layout(micro_batch=2, recompute="full", recompute_every=2),
    "full": Layout(micro_batch=2, recompute="full"),
}
CASES: Mapping[str, tuple[ModelSpec, JobSpec, Mapping[str, Layout]]] = {
    "data 4": (STATES, JobSpec(global_batch=8, seq_len=128, num_steps=1000, precision="fp32"), ZERO),
    "data 2": (STATES, JobSpec(global_batch=8, seq_len=128, num_steps=1000, precision="fp32"), ZERO_OF_2),
    "recompute": (ACTIVATIONS, JobSpec(global_batch=2, seq_len=1024, num_steps=1000, precision="fp32"), RECOMPUTE),
}
WORTH, TOLERANCE = 0.05, 0.1


def contender(name: str, plan: Plan, told: Path) -> Contender:
    """The trainer with this plan. After each step a rank writes to a file in `told` by how many bytes its resident
    memory has been above what it was before its Engine was made."""

    def steps(rank: int, folder: Path) -> Steps:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
        with here.engine_of(plan, rank, folder, Recorder()) as engine:
            tokens = torch.randint(0, plan.model.vocab, (len(engine.positions), plan.job.seq_len))
            batches = engine.micro_batches(tokens, tokens, plan.job.tokens_per_step, 0)
            while True:
                loss = engine.forward_backward(batches)
                engine.synchronize()
                engine.totals(loss)
                engine.update(1e-4, 1.0)
                (told / f"{name}-{rank}").write_text(json.dumps(resident("VmHWM") - before), encoding="ascii")
                yield {}

    return Contender(name=name, num_ranks=plan.layout.num_ranks, steps=steps)


def resident(which: str) -> int:
    """Bytes of this process that are in memory (VmRSS), or the most that ever were (VmHWM); proc(5)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{which}:"))
    return int(line.split()[1]) * 1024


def measured(name: str, plan: Plan, num_steps: int) -> int:
    """Bytes of the fullest rank."""
    with TemporaryDirectory() as folder:
        take_turn(contender(name, plan, Path(folder)), num_steps)
        return max(json.loads(file.read_text(encoding="ascii")) for file in Path(folder).iterdir())


def claimed(plan: Plan) -> Mapping[str, int]:
    """Bytes of the fullest stage by kind, as the planner prices the layout."""
    prediction = predict(plan.model, plan.job, plan.cluster, plan.layout).prediction
    assert prediction is not None
    return max(prediction.memory_bytes, key=lambda stage: sum(stage.values()))


def table(title: str, real: Mapping[str, int], said: Mapping[str, Mapping[str, int]]) -> Table:
    """One layout a row, in MiB; savings are against the first."""
    kinds = [kind for kind in next(iter(said.values())) if any(stage[kind] for stage in said.values())]
    shown = Table(title=f"{title}: MiB of the fullest rank", title_justify="left")
    shown.add_column("")
    for column in (*kinds, "claimed", "measured", "ratio", "saves, claimed", "measured"):
        shown.add_column(column, justify="right")
    first = next(iter(real))
    for name, stage in said.items():
        total = sum(stage.values())
        saved = (sum(said[first].values()) - total, real[first] - real[name])
        shown.add_row(
            name,
            *(_mib(stage[kind]) for kind in kinds),
            _mib(total),
            _mib(real[name]),
            f"{real[name] / total:.2f}",
            *("" if name == first else _mib(each) for each in saved),
        )
    return shown


def missed(real: Mapping[str, int], said: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Layouts that save less than they should, in words."""
    first, found = next(iter(real)), []
    base = sum(said[first].values())
    for name in real:
        wanted, saved = base - sum(said[name].values()), real[first] - real[name]
        if wanted > WORTH * base and saved < wanted - TOLERANCE * base:
            found.append(f"{name} saves {_mib(saved)} MiB of the {_mib(wanted)} claimed")
    return found


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="only these")
    parser.add_argument("--steps", type=int, default=2, help="steps of each layout, after one to warm up (default 2)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a process with idle threads must not be forked
    console, failed = Console(width=None if sys.stdout.isatty() else 150), list[str]()
    for case in given.cases:
        model, job, layouts = CASES[case]
        plans = {name: here.plan_here(model, job, layout) for name, layout in layouts.items()}
        real, said = {}, {name: claimed(plan) for name, plan in plans.items()}
        for name, plan in plans.items():
            with console.status(f"{case}: {name}"):
                real[name] = measured(name, plan, given.steps)
        console.print(table(case, real, said))
        failed += [f"{case}: {line}" for line in missed(real, said)]
    for line in failed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
