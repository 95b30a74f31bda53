"""The commands in the order in which one meets them: what each does, and examples of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Command(NamedTuple):
    """What `phalanx --help` says of a command, and what its own help shows at the end."""

    what: str
    examples: str


COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        "train a small model on 8 processes and hold its first steps against one process",
        """\
  phalanx demo
  phalanx demo examples/demo.toml --set job.num_steps=10""",
    ),
    "plan": Command(
        "rank every legal layout for a run file",
        """\
  phalanx plan examples/gpt-20b-256-a100.toml
  phalanx plan run.toml --explain --set layout.tensor=8
  phalanx plan run.toml --html plan.html -o plan.json
  phalanx plan run.toml --engine megatron-core-2024 --emit megatron-lm""",
    ),
    "verify": Command(
        "compare a layout with one process: losses, every gradient, copies of weights",
        """\
  phalanx verify examples/tiny.toml
  phalanx verify run.toml --steps 5 --set job.precision=fp64""",
    ),
    "train": Command(
        "train what a run file or a plan describes, here or as one of the processes of torchrun or srun",
        """\
  phalanx train examples/tiny.toml
  phalanx train plan.json --run-dir runs/first
  phalanx train run.toml --resume runs/first/checkpoints/step-001000 --set optimizer.lr=1e-4
  torchrun --nproc-per-node=8 --no-python phalanx train run.toml
  srun phalanx train run.toml""",
    ),
    "run": Command(
        "run a Python script that trains a module of your own as several processes here",
        """\
  phalanx run --ranks 4 train.py
  phalanx run --ranks 2 train.py --epochs 3""",
    ),
    "generate": Command(
        "continue a text with the model of a checkpoint or a Hugging Face folder",
        """\
  phalanx generate runs/first "def main("
  phalanx generate runs/first/checkpoints/step-001000 "Once" --temperature 0.8 --top-k 50 --max-tokens 200""",
    ),
    "checkpoint": Command(
        "list, check, rewrite or average checkpoints, export or import Hugging Face folders",
        """\
  phalanx checkpoint list runs/first
  phalanx checkpoint export runs/first -o exported
  phalanx checkpoint average runs/first runs/second -o mean""",
    ),
    "data": Command(
        "build or inspect token files",
        """\
  phalanx data build "books/**/*.txt" --vocab 32000
  phalanx data build corpus.jsonl.zst --tokenizer tokenizer.json -o data/corpus
  phalanx data inspect data/corpus/tokens --config run.toml""",
    ),
    "measure": Command(
        "measure this machine, for plans that rest on it",
        """\
  phalanx measure -o cluster.toml
  srun phalanx measure -o cluster.toml""",
    ),
    "schedule": Command(
        "draw a pipeline schedule",
        """\
  phalanx schedule show --pipeline 4 --micro-batches 8
  phalanx schedule show --schedule zb-v --pipeline 4 --micro-batches 8 --svg schedule.svg
  phalanx schedule show --run runs/first""",
    ),
}
