"""A step of ZeRO 1 to 3 beside DeepSpeed's: `python benchmarks/deepspeed_peer.py FOLDER`.

DeepSpeed is no dependency of this project: the first call makes an environment for it in FOLDER (some minutes), and
every call continues there. What is measured, and how, says peer.py.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
os.environ["DS_ACCELERATOR"] = "cpu"

import argparse
import importlib
import importlib.util
import logging
import subprocess
import sys
import venv
from pathlib import Path

import peer
import plain_model
import step_time
import torch
from crew import Contender, Steps

from phalanx.plan.layout import Layout

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {f"data 2, ZeRO {stage}": Layout(data=2, zero=stage, micro_batch=4) for stage in (1, 2, 3)}


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


def load() -> None:
    """Import what its ranks need."""
    plain_model.load()
    logging.disable(logging.WARNING)
    importlib.import_module("deepspeed")


def theirs(name: str, layout: Layout) -> Contender:
    """DeepSpeed with the ZeRO stage of `layout`."""

    def steps(rank: int, folder: Path) -> Steps:
        import deepspeed

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.data))
        plain_model.join(rank, layout.data, folder)
        model = plain_model.Transformer(step_time.MODEL, step_time.SEQ_LEN, range(step_time.MODEL.num_layers))
        samples = torch.randint(
            0, step_time.MODEL.vocab, (step_time.GLOBAL_BATCH // layout.data, step_time.SEQ_LEN + 1)
        )
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), fused=True),
            config={
                "train_micro_batch_size_per_gpu": len(samples),
                "zero_optimization": {"stage": layout.zero},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
            dist_init_required=False,
        )
        while True:
            engine.backward(plain_model.loss_of(engine(samples[:, :-1]), samples[:, 1:]))
            engine.step()
            yield {}

    return Contender(name=name, num_ranks=layout.data, steps=steps, load=load)


def main() -> int:
    """Find or make the environment, and measure in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environment with DeepSpeed is, or is to be made")
    peer.add_arguments(parser)
    given = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        return subprocess.run([str(environment(given.folder.absolute())), *sys.argv], check=False).returncode
    peer.compare("DeepSpeed", LAYOUTS, theirs, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
