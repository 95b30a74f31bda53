"""This trainer beside another framework: what the scripts for each such peer share.

Model, batch and measure are those of step_time.py: contenders take turns, and the figure is CPU seconds per step over
all ranks, as the median of ratios within one round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import step_time
import torch
from crew import Contender
from rich.console import Console
from rich.table import Table

from phalanx.plan.layout import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every such script has."""
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default 3)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a turn (default 2)")


def compare(
    peer: str,
    layouts: Mapping[str, Layout],
    theirs: Callable[[str, Layout], Contender],
    given: argparse.Namespace,
) -> None:
    """Let this trainer and `peer` take turns in the same layouts, and print how they compare. `theirs(name, layout)`
    makes the peer's contender."""
    torch.set_num_threads(1)  # a process with idle threads must not be forked
    with TemporaryDirectory() as folder:
        data = step_time.write_tokens(Path(folder) / "tokens")
        pairs = {
            name: (step_time.ours(name, layout, data), theirs(f"{peer}, {name}", layout))
            for name, layout in layouts.items()
        }
        contenders = [contender for pair in pairs.values() for contender in pair]
        turns = step_time.take_turns(contenders, given.rounds, given.steps, Console(stderr=True))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(peer, pairs, turns))
    said = f"medians of {given.rounds} rounds of {given.steps} steps; best: of one round; GiB: of the fullest rank"
    console.print(said)


def table(peer: str, pairs: Mapping[str, tuple[Contender, Contender]], turns: step_time.Rounds) -> Table:
    """One pair a row: this trainer's figures, the peer's, and the ratio of CPU seconds."""
    shown = Table(title=f"One optimizer step, this trainer beside {peer}", title_justify="left")
    shown.add_column("layout")
    for column in ("CPU s", "theirs", "ratio", "best", "wall s", "theirs", "GiB", "theirs"):
        shown.add_column(column, justify="right")
    for name, pair in pairs.items():
        both = [turns[contender.name] for contender in pair]
        ratios = step_time.ratios(turns, *(contender.name for contender in pair))
        shown.add_row(
            name,
            *(f"{statistics.median(turn.cpu_s for turn in mine):.2f}" for mine in both),
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}",
            *(f"{statistics.median(turn.wall_s for turn in mine):.2f}" for mine in both),
            *(f"{statistics.median(turn.peak_bytes for turn in mine) / 2**30:.2f}" for mine in both),
        )
    return shown
