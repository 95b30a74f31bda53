"""A step of ZeRO 1 to 3 beside DeepSpeed's: `python benchmarks/deepspeed_peer.py FOLDER`.

DeepSpeed is no dependency of this project: the first call makes an environment for it in FOLDER (some minutes), and
every call continues there. Model, batch and measure are those of step_time.py: contenders take turns, and the figure is
CPU seconds per step over all ranks, as the median of ratios within one round.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
os.environ["DS_ACCELERATOR"] = "cpu"

import argparse
import importlib
import importlib.util
import logging
import statistics
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
STAGES = (1, 2, 3)


def environment(folder: Path) -> Path:
    """The Python of an environment that holds this project, what its benchmarks need, and DeepSpeed."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing DeepSpeed into {folder}: some minutes, once", file=sys.stderr)
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*install, "--editable", str(ROOT), "deepspeed"], check=True)
        (folder / "complete").touch()
    return python


def compare(num_rounds: int, num_steps: int) -> None:
    """Let both take turns and print the ratios."""
    import numpy as np
    import plain_model
    import step_time
    import torch
    import torch.distributed as dist
    from crew import Contender, Steps, Turn, take_turn
    from rich.console import Console
    from rich.table import Table

    from phalanx.data.tokens import TokenWriter
    from phalanx.plan.layout import Layout

    torch.set_num_threads(1)  # a process with idle threads must not be forked
    samples = torch.randint(0, step_time.MODEL.vocab, (step_time.GLOBAL_BATCH, step_time.SEQ_LEN + 1))

    def load() -> None:
        plain_model.load()
        logging.disable(logging.WARNING)
        importlib.import_module("deepspeed")

    def theirs(stage: int) -> Contender:
        def steps(rank: int, folder: Path) -> Steps:
            import deepspeed

            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            plain_model.join(rank, 2, folder)
            model = plain_model.Transformer(step_time.MODEL, step_time.SEQ_LEN, range(step_time.MODEL.num_layers))
            share = step_time.GLOBAL_BATCH // 2
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.AdamW(model.parameters(), fused=True),
                config={
                    "train_micro_batch_size_per_gpu": share,
                    "zero_optimization": {"stage": stage},
                    "zero_allow_untested_optimizer": True,
                    "zero_force_ds_cpu_optimizer": False,
                },
                dist_init_required=False,
            )
            mine = samples.chunk(2)[rank]
            while True:
                loss = plain_model.loss_of(engine(mine[:, :-1]), mine[:, 1:])
                engine.backward(loss)
                engine.step()
                yield {}

        return Contender(name=f"DeepSpeed, ZeRO {stage}", num_ranks=2, steps=steps, load=load)

    with TemporaryDirectory() as folder:
        data = Path(folder) / "tokens"
        with TokenWriter(data, np.uint16) as writer:
            writer.add(samples.numpy().astype(np.uint16).repeat(8, 0).flatten())
            writer.end_document()
        pairs = {
            stage: (step_time.ours(f"ZeRO {stage}", Layout(data=2, zero=stage, micro_batch=4), data), theirs(stage))
            for stage in STAGES
        }
        turns: dict[str, list[Turn]] = {}
        for number in range(num_rounds):
            for contender in [contender for pair in pairs.values() for contender in pair]:
                with Console(stderr=True).status(f"round {number + 1} of {num_rounds}: {contender.name}"):
                    turns.setdefault(contender.name, []).append(take_turn(contender, num_steps))
    table = Table(title=f"data 2, CPU seconds per step, {num_rounds} rounds", title_justify="left")
    for column in ("", "ours", "DeepSpeed", "ratio", "GiB ours", "GiB DeepSpeed"):
        table.add_column(column, justify="right")
    for stage, (ours, other) in pairs.items():
        both = turns[ours.name], turns[other.name]
        ratio = statistics.median(step_time.ratios(turns, ours.name, other.name))
        seconds = [f"{statistics.median(turn.cpu_s for turn in mine):.2f}" for mine in both]
        peaks = [f"{statistics.median(turn.peak_bytes for turn in mine) / 2**30:.2f}" for mine in both]
        table.add_row(f"ZeRO {stage}", *seconds, f"{ratio:.2f}", *peaks)
    Console().print(table)
    assert not dist.is_initialized(), "only ranks join"


def main() -> int:
    """Find or make the environment, and measure in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environment with DeepSpeed is, or is to be made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        return subprocess.run([str(environment(given.folder.absolute())), *sys.argv], check=False).returncode
    compare(given.rounds, given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
