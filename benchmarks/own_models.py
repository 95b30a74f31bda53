"""What a step of a user's own module costs beside torch's own ways: `python benchmarks/own_models.py`.

The same module, a transformer and a residual network, over two processes: with `phalanx.prepare` and under torch's
DistributedDataParallel; with ZeRO 3 and under `fully_shard`. Contenders take turns, round by round. The figure is CPU
seconds of a step, summed over ranks, as a ratio within one round; the exit code is 1 if a median exceeds 1 by more than
5 %.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import plain_model
import torch
from crew import Contender, Steps, Turn, take_turn
from rich.console import Console
from rich.table import Table
from step_time import GLOBAL_BATCH, MODEL, SEQ_LEN, TOLERANCE
from torch import Tensor, nn

from phalanx.launch.port import listen
from phalanx.own.prepare import prepared
from phalanx.own.step import Step
from phalanx.own.units import named_tensors
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.rundir import RunDir
from phalanx.spec.job import JobSpec, OptimizerSpec
from phalanx.trainer.process import keep_freed_memory
from phalanx.trainer.world import join

NUM_RANKS = 2
NUM_IMAGES = 64


class Residual(nn.Module):
    """Two convolutions and batch norms around which the input is carried."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        first = torch.relu(self.norms[0](self.convolutions[0](inputs)))
        return torch.relu(inputs + self.norms[1](self.convolutions[1](first)))


class ResNet(nn.Module):
    """A residual network for images of 16 × 16 pixels."""

    def __init__(self, channels: int = 64, num_blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(num_blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.stem(images))).mean((2, 3)))


def transformer() -> nn.Module:
    """That of benchmarks/step_time.py, in torch alone."""
    return plain_model.Transformer(MODEL, SEQ_LEN, range(MODEL.num_layers))


def tokens() -> tuple[Tensor, Tensor]:
    """One global batch."""
    samples = torch.randint(0, MODEL.vocab, (GLOBAL_BATCH, SEQ_LEN + 1))
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def images() -> tuple[Tensor, Tensor]:
    """One global batch."""
    return torch.randn(NUM_IMAGES, 3, 16, 16), torch.randint(10, (NUM_IMAGES,))


def loss_of(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def ours(name: str, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], zero: int) -> Contender:
    """`phalanx.prepare`, all that it does in a step."""
    size = len(batch[0])

    def load() -> None:
        with listen(None) as free:
            address, port = free.getsockname()
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), WORLD_SIZE=str(NUM_RANKS))

    def steps(rank: int, folder: Path) -> Steps:
        keep_freed_memory()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        module = make()
        optimizer = OptimizerSpec(schedule="constant")
        plan = ModulePlan(
            job=JobSpec(global_batch=size, seq_len=1, num_steps=1000, precision="fp32", optimizer=optimizer),
            layout=Layout(data=NUM_RANKS, zero=zero, micro_batch=size // NUM_RANKS),
        ).of(named_tensors(module))
        world = join(plan, RunDir(folder / "run"))
        step = Step(world, plan, prepared(world, module, plan), run_dir=None)
        while True:
            step.forward_backward(step.share(batch), loss_of)
            step.update()
            yield {}

    return Contender(name=name, num_ranks=NUM_RANKS, steps=steps, load=load)


def torch_alone(
    name: str, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], spread: Callable[[nn.Module], nn.Module]
) -> Contender:
    """The same steps as a plain script takes them, the module spread by `spread`; with clipping, as ours."""

    def steps(rank: int, folder: Path) -> Steps:
        plain_model.join(rank, NUM_RANKS, folder)
        module = spread(make())
        optimizer = plain_model.optimizer_of(module)
        mine = tuple(tensor.chunk(NUM_RANKS)[rank] for tensor in batch)
        while True:
            loss_of(module(mine[0]), mine).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield {}

    return Contender(name=name, num_ranks=NUM_RANKS, steps=steps, load=plain_model.load)


def sharded(module: nn.Module) -> nn.Module:
    """`fully_shard`, block by block, parameters freed after each use."""
    from torch.distributed.fsdp import fully_shard

    mesh = plain_model.mesh_of((1, NUM_RANKS, 1))["data"]
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return module


def pairs() -> list[tuple[Contender, Contender]]:
    """Ours, and what it is held against."""
    made = []
    for kind, make, batch in (("transformer", transformer, tokens()), ("ResNet", ResNet, images())):
        both = functools.partial(torch_alone, make=make, batch=batch)
        made.append(
            (
                ours(f"{kind}, data 2", make, batch, 0),
                both(f"{kind}, DistributedDataParallel", spread=nn.parallel.DistributedDataParallel),
            )
        )
        made.append((ours(f"{kind}, data 2, ZeRO 3", make, batch, 3), both(f"{kind}, fully_shard", spread=sharded)))
    return made


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default 3)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a turn (default 3)")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON instead of a table")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a process with idle threads must not be forked
    console = Console(stderr=True)
    found: dict[tuple[str, str], list[tuple[Turn, Turn]]] = {}
    for number in range(given.rounds):
        for mine, theirs in pairs():
            with console.status(f"round {number + 1} of {given.rounds}: {mine.name}"):
                turns = take_turn(mine, given.steps), take_turn(theirs, given.steps)
                found.setdefault((mine.name, theirs.name), []).append(turns)
    medians = {names: statistics.median(ratios(turns)) for names, turns in found.items()}
    if given.json:
        print(json.dumps({f"{mine} / {theirs}": ratios(turns) for (mine, theirs), turns in found.items()}, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table(found))
    return int(any(median > 1 + TOLERANCE for median in medians.values()))


def ratios(turns: Sequence[tuple[Turn, Turn]]) -> list[float]:
    """CPU seconds of ours over those of torch's, round by round."""
    return [mine.cpu_s / theirs.cpu_s for mine, theirs in turns]


def table(found: dict[tuple[str, str], list[tuple[Turn, Turn]]]) -> Table:
    """One comparison a row."""
    shown = Table(title="CPU seconds of a step, two processes", title_justify="left")
    for column in ("ours", "against"):
        shown.add_column(column)
    for column in ("s", "s there", "median", "best"):
        shown.add_column(column, justify="right")
    for (mine, theirs), turns in found.items():
        seconds = [statistics.median(turn[side].cpu_s for turn in turns) for side in (0, 1)]
        over = ratios(turns)
        shown.add_row(
            mine, theirs, *(f"{each:.2f}" for each in seconds), f"{statistics.median(over):.2f}", f"{min(over):.2f}"
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
