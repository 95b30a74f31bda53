"""Measure this machine: matrix products, memory, attention, starting kernels, messages. Writes a cluster file, which a
run file names as [cluster] file = "…" so that plans rest on it. Takes under a minute; keep the machine quiet meanwhile.
Over several machines, start it with torchrun or srun, one process per device. Exit codes: 0 done, 2 wrong input."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from phalanx.cli.inputs import count_of, writing
from phalanx.launch.environment import launched, num_gpus
from phalanx.launch.script import start_script
from phalanx.spec.clusters import num_cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx measure`."""
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("cluster.toml"), metavar="FILE", help="what to write (cluster.toml)"
    )
    what = "processes on this machine (one per GPU, or else per core)"
    parser.add_argument("--ranks", type=count_of("processes"), metavar="N", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Measure as one of the ranks that somebody started, or start them here."""
    started = launched()
    if started:
        from phalanx.trainer.measure_links import measure

        measure(arguments.output)
        if started.rank == 0:
            _say(arguments.output)
        return 0
    ranks = arguments.ranks or num_gpus() or num_cores()
    was_there = arguments.output.exists()
    with writing(arguments.output, "--output"), arguments.output.open("a", encoding="utf-8"):
        pass  # found out before it takes a minute
    code = start_script(ranks, ["-m", "phalanx.trainer.measure_links", str(arguments.output)])
    if code == 0:
        _say(arguments.output)
    elif not was_there and not arguments.output.stat().st_size:
        arguments.output.unlink()
    return code


def _say(path: Path) -> None:
    sys.stdout.write(f'wrote {path}: [cluster] file = "{path}" in a run file\n')
