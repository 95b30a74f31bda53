"""Run a Python script of your own, one that calls phalanx.prepare or phalanx.Trainer, as several ranks on this machine.
Under torchrun or srun start the script itself. Exit codes: 0 done, else that of the first rank that failed."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.inputs import count_of
from phalanx.errors import InputError
from phalanx.launch.script import start_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx run`."""
    parser.add_argument("--ranks", type=count_of("processes"), required=True, metavar="N", help="number of processes")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks and wait for them."""
    if not Path(arguments.script).is_file():
        raise InputError(f"there is no script {arguments.script}", instead="phalanx run --ranks N SCRIPT …")
    return start_script(arguments.ranks, [arguments.script, *arguments.arguments])
