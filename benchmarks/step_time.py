"""How long a step takes in every layout, beside the same model in torch alone: `python benchmarks/step_time.py`.

All contenders take turns, round by round, so that what else the machine does hits all alike. The figure to trust on a
shared machine is CPU seconds per step, summed over ranks, as a ratio within one round; the median of the rounds is held
against aims.json, which names for each layout its peers and the most of their CPU seconds that it may take. The exit
code is 1 if one exceeds its aim by more than 5 %.

Cores that share caches and memory slow each other down, by 10 % on some machines: "one process, twice", one process
while a copy of it keeps another core as busy, shows by how much.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import plain_model
import torch
from crew import Contender, Steps, Turn, take_turn
from here import LLAMA, plan_here
from rich.console import Console
from rich.table import Table

from phalanx.data.source import Source
from phalanx.data.tokens import TokenWriter
from phalanx.launch.port import listen
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir
from phalanx.spec.job import DataSpec, JobSpec
from phalanx.trainer.engine import Engine
from phalanx.trainer.optim import clip_coefficient
from phalanx.trainer.process import keep_freed_memory
from phalanx.trainer.world import join

MODEL = replace(LLAMA, num_layers=8, vocab=4096)
BF16 = "one process, bf16"
SEQ_LEN, GLOBAL_BATCH, NUM_MICRO_BATCHES = 256, 16, 4
LAYOUTS = {
    "one process": Layout(micro_batch=4),
    BF16: Layout(micro_batch=4),
    "data 2": Layout(data=2, micro_batch=4),
    "data 2, ZeRO 1": Layout(data=2, zero=1, micro_batch=4),
    "data 4, ZeRO 3": Layout(data=4, zero=3, micro_batch=4),
    "pipeline 2": Layout(pipeline=2, micro_batch=4),
    "pipeline 2, interleaved": Layout(pipeline=2, schedule="interleaved-1f1b", virtual_stages=2, micro_batch=4),
    "pipeline 2, ZB-H1": Layout(pipeline=2, schedule="zb-h1", micro_batch=4),
    "pipeline 2, ZB-V": Layout(pipeline=2, schedule="zb-v", virtual_stages=2, micro_batch=4),
    "tensor 2": Layout(tensor=2, micro_batch=4),
    "tensor 2, sequence parallel": Layout(tensor=2, sequence_parallel=True, micro_batch=4),
    "tensor 2 × data 2": Layout(tensor=2, data=2, micro_batch=4),
    "tensor 2 × pipeline 2": Layout(tensor=2, pipeline=2, micro_batch=4),
    "2 × 2 × 2": Layout(tensor=2, pipeline=2, data=2, micro_batch=2),
    "2 × 2 × 2, sequence parallel": Layout(tensor=2, pipeline=2, data=2, sequence_parallel=True, micro_batch=2),
}
PLAIN_HERE = "plain, our allocator settings"
TWICE = "one process, twice"
TOLERANCE = 0.05
AXES = ("tensor", "pipeline", "data")

Rounds = Mapping[str, Sequence[Turn]]
Aims = Mapping[str, Mapping[str, Any]]
"""Per layout, `cpu`: the most of each base's CPU seconds, by the base's name; `peak_gib`: of a process."""


def ours(name: str, layout: Layout, data: Path, copies: int = 1) -> Contender:
    """This trainer with `layout`, over the tokens at the prefix `data`; or copies of one process, side by side."""
    assert copies == 1 or layout.num_ranks == 1, "only one process can be copied"
    job = JobSpec(
        global_batch=GLOBAL_BATCH,
        seq_len=SEQ_LEN,
        num_steps=1000,
        precision="bf16" if name == BF16 else "fp32",
        data=DataSpec(path=str(data)),
    )
    plan = plan_here(MODEL, job, layout)

    def load() -> None:
        with listen(None) as free:
            address, port = free.getsockname()
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), WORLD_SIZE=str(layout.num_ranks))

    def steps(rank: int, folder: Path) -> Steps:
        keep_freed_memory()
        mine, copy = rank % layout.num_ranks, rank // layout.num_ranks
        os.environ.update(RANK=str(mine), LOCAL_RANK=str(mine))
        world = join(plan, RunDir(folder / f"copy-{copy}"))
        source = Source.of(plan.job, MODEL.vocab)
        engine = Engine(plan, world.coord, world.comm, world.device)
        try:
            for number in itertools.count():
                before = dict(world.recorder.seconds)
                step(engine, source, number)
                yield {kind: total - before.get(kind, 0.0) for kind, total in world.recorder.seconds.items()}
        finally:
            world.close()

    return Contender(name=name, num_ranks=layout.num_ranks * copies, steps=steps, load=load, copies=copies)


def step(engine: Engine, source: Source, number: int) -> None:
    """What `trainer.loop` does in a step, without its report."""
    loss = engine.forward_backward(engine.read(source.batch(number, list(engine.positions)), number))
    engine.synchronize()
    _, norm, _ = engine.totals(loss)
    optimizer = engine.plan.job.optimizer
    engine.update(optimizer.lr, clip_coefficient(norm, optimizer.clip_norm))


def references() -> list[Contender]:
    """Torch alone, over random tokens: what they are does not change the time."""
    samples = torch.randint(0, MODEL.vocab, (GLOBAL_BATCH, SEQ_LEN + 1))
    torch_alone = plain_model.Reference(
        MODEL, samples[:, :-1].contiguous(), samples[:, 1:].contiguous(), NUM_MICRO_BATCHES
    )
    made = {
        "plain": (1, torch_alone.plain),
        PLAIN_HERE: (1, torch_alone.plain_keeping_memory),
        "plain, bf16 autocast": (1, torch_alone.plain_bf16),
        "DistributedDataParallel": (2, torch_alone.data_parallel),
        "fully_shard": (2, torch_alone.fully_sharded),
        "fully_shard over 4": (4, torch_alone.fully_sharded_over_4),
        "pipelining 1F1B": (2, torch_alone.pipeline_parallel),
        "pipelining interleaved": (2, torch_alone.interleaved),
        "pipelining zero bubble": (2, torch_alone.zero_bubble),
        "pipelining ZB-V": (2, torch_alone.zero_bubble_v),
        "DTensor": (2, torch_alone.tensor_parallel),
        "DTensor × fully_shard": (4, torch_alone.tensor_and_data_parallel),
        "DTensor × 1F1B": (4, torch_alone.tensor_and_pipeline_parallel),
        "DTensor × fully_shard × 1F1B": (8, torch_alone.composed),
    }
    return [
        Contender(name=name, num_ranks=num_ranks, steps=steps, load=plain_model.load)
        for name, (num_ranks, steps) in made.items()
    ]


def run(names: Sequence[str], peers: Set[str], num_rounds: int, num_steps: int, console: Console) -> Rounds:
    """Let the layouts `names` and torch's `peers` take `num_rounds` turns of `num_steps` steps each."""
    with TemporaryDirectory() as folder:
        data = write_tokens(Path(folder) / "tokens")
        contenders = [ours(name, LAYOUTS[name], data) for name in names]
        contenders.insert(1, ours(TWICE, LAYOUTS["one process"], data, copies=2))
        contenders += [reference for reference in references() if reference.name in peers]
        return take_turns(contenders, num_rounds, num_steps, console)


def take_turns(contenders: Sequence[Contender], num_rounds: int, num_steps: int, console: Console) -> Rounds:
    """Round by round, let each contender take a turn. Call it in a process with one thread."""
    turns: dict[str, list[Turn]] = {}
    for number in range(num_rounds):
        for contender in contenders:
            with console.status(f"round {number + 1} of {num_rounds}: {contender.name}"):
                turns.setdefault(contender.name, []).append(take_turn(contender, num_steps))
    return turns


def write_tokens(prefix: Path) -> Path:
    """Random tokens for this trainer, enough for many steps; returns their prefix."""
    with TokenWriter(prefix, np.uint16) as writer:
        writer.add(np.random.default_rng(0).integers(0, MODEL.vocab, 64 * GLOBAL_BATCH * SEQ_LEN, dtype=np.uint16))
        writer.end_document()
    return prefix


def ratios(turns: Rounds, name: str, base: str) -> list[float]:
    """CPU seconds of one contender over those of another, round by round; empty if either did not run."""
    if name not in turns or base not in turns:
        return []
    return [mine.cpu_s / theirs.cpu_s for mine, theirs in zip(turns[name], turns[base], strict=True)]


def comparisons(turns: Rounds, aims: Aims) -> Iterator[tuple[str, str, float, list[float]]]:
    """All that was measured and has an aim: layout, base, aim, and the ratios."""
    for name, aim in aims.items():
        for base, most in aim["cpu"].items():
            if over := ratios(turns, name, base):
                yield name, base, most, over


def failures(turns: Rounds, aims: Aims) -> list[str]:
    """What exceeds its aim by more than 5 %, in words."""
    found = [
        f"{name}: {statistics.median(over):.2f} of the CPU seconds of {base}, aim {most}"
        for name, base, most, over in comparisons(turns, aims)
        if statistics.median(over) > most * (1 + TOLERANCE)
    ]
    for name, mine in turns.items():
        most = aims.get(name, {}).get("peak_gib")
        if most is not None and _peak_gib(mine) > most * (1 + TOLERANCE):
            found.append(f"{name}: {_peak_gib(mine):.2f} GiB per process, aim {most}")
    return found


def table(turns: Rounds, aims: Aims) -> Table:
    """All contenders, one a row."""
    shown = Table(title="One optimizer step, 8.9 M parameters, 4,096 tokens", title_justify="left")
    shown.add_column("layout")
    for column in ("CPU s", "wall s", "compute", *AXES, "other", "idle", "GiB", "aim"):
        shown.add_column(column, justify="right")
    for name, mine in turns.items():
        shown.add_row(
            name,
            f"{statistics.median(turn.cpu_s for turn in mine):.2f}",
            f"{statistics.median(turn.wall_s for turn in mine):.2f}",
            *_split(min(mine, key=lambda turn: turn.wall_s), name in LAYOUTS),
            f"{_peak_gib(mine):.2f}",
            str(aims.get(name, {}).get("peak_gib", "")),
        )
    return shown


def comparison_table(turns: Rounds, aims: Aims) -> Table:
    """Every layout against each of its bases."""
    shown = Table(title="CPU seconds over those of …", title_justify="left")
    for column in ("layout", "of"):
        shown.add_column(column)
    for column in ("median", "best", "aim", ""):
        shown.add_column(column, justify="right")
    for name, base, most, over in comparisons(turns, aims):
        middle = statistics.median(over)
        verdict = "met" if middle <= most else "near" if middle <= most * (1 + TOLERANCE) else "missed"
        shown.add_row(name, base, f"{middle:.2f}", f"{min(over):.2f}", f"{most:.2f}", verdict)
    return shown


def _split(turn: Turn, counted: bool) -> list[str]:
    """Shares of the average rank's time: computing, blocked on each axis and on the rest; and how idle the cores were
    that this contender could have used."""
    if not counted:
        return [""] * (len(AXES) + 3)
    other = sum(share for kind, share in turn.blocked.items() if kind not in AXES)
    shares = [1 - sum(turn.blocked.values()), *(turn.blocked.get(axis, 0.0) for axis in AXES), other, turn.idle]
    return [f"{share:.0%}" for share in shares]


def _peak_gib(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.peak_bytes for turn in turns) / 2**30


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=tuple(LAYOUTS), help="only these")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default 3)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a turn (default 2)")
    parser.add_argument("--no-references", action="store_true", help="leave torch alone out")
    parser.add_argument("--json", action="store_true", help="print all turns as JSON instead of a table")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a process with idle threads must not be forked
    aims = json.loads((Path(__file__).parent / "aims.json").read_text(encoding="utf-8"))
    names = [name for name in LAYOUTS if name in given.layouts or name == "one process"]
    peers = set() if given.no_references else {PLAIN_HERE, *(base for name in names for base in aims[name]["cpu"])}
    turns = run(names, peers, given.rounds, given.steps, Console(stderr=True))
    if given.json:
        print(json.dumps({name: [asdict(turn) for turn in mine] for name, mine in turns.items()}, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 180)
        console.print(table(turns, aims), comparison_table(turns, aims), sep="\n\n")
    missed = failures(turns, aims)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
