"""Train a small model on real text on 8 processes of this machine, then its first steps on one process, and show both.
Exit code 1 if their losses differ."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.inputs import add_overrides, plan_of, with_data
from phalanx.errors import InputError
from phalanx.rundir import RunDir

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.studies.demo import Demonstration

DEMO = Path("examples/demo.toml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx demo`."""
    what = "a run file (TOML) other than examples/demo.toml"
    parser.add_argument("run", type=Path, nargs="?", default=DEMO, metavar="RUN", help=what)
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train twice, print the outcome."""
    from rich.console import Console

    from phalanx.studies.demo import demonstrate

    if arguments.run == DEMO and not DEMO.is_file():
        raise InputError(f"there is no {DEMO} here", instead="run it in Phalanx's folder, or name a run file")
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    plan = with_data(plan_of(arguments.run, arguments.overrides))
    shown = demonstrate(plan, RunDir.default(plan.model.name), lambda line: _say(console, line))
    _show(shown, console)
    return 0 if shown.ok else 1


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False)


def _show(shown: Demonstration, console: Console) -> None:
    from rich.table import Table

    first, last = shown.records[0], shown.records[-1]
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_row("loss", f"{first.loss:.4f} in step {first.step}, {last.loss:.4f} in step {last.step}")
    facts.add_row("speed", f"{shown.tokens_per_s:,.0f} tokens/s on all {shown.plan.layout.num_ranks} processes")
    facts.add_row("checkpoint", str(shown.checkpoint))
    facts.add_row("metrics", str(shown.metrics))
    ours = f"loss on {shown.plan.layout.num_ranks} processes"
    steps = Table("step", ours, "on one process", "difference", "allowed", box=None, pad_edge=False)
    for here, there, (error, allowed) in zip(shown.records, shown.alone, shown.errors(), strict=False):
        style = "" if error <= allowed else "red"
        cells = str(here.step), f"{here.loss:.9g}", f"{there.loss:.9g}", f"{error:.1e}", f"{allowed:.1e}"
        steps.add_row(*cells, style=style)
    console.print("", facts, "", steps)
    outcome = "computes what one process computes" if shown.ok else "[red]differs from one process[/red]"
    console.print(f"\n{shown.plan.layout} {outcome}")
