"""`phalanx plan`: rank every legal layout for a run file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.inputs import add_run, ranked
from phalanx.errors import InputError

if TYPE_CHECKING:
    from phalanx.planner.search import Search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx plan`."""
    add_run(parser)
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many layouts to show (10)")
    parser.add_argument("--engine", default="phalanx", help="the training system that shall run it (phalanx)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PLAN", help="write the best plan, as phalanx train reads it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, print, write."""
    from phalanx.planner.summary import as_json
    from phalanx.spec.load import load

    if arguments.top < 1:
        raise InputError(f"{arguments.top} layouts", where="--top", instead="1 or more")
    found = ranked(load(arguments.run, arguments.overrides), top=arguments.top, engine=arguments.engine)
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(found), indent=1) + "\n")
    else:
        _show(found)
    if arguments.output:
        found.plans[0].write(arguments.output)
    return 0


def _show(found: Search) -> None:
    from rich.console import Console
    from rich.table import Table

    from phalanx.planner.summary import summary
    from phalanx.units import format_bytes, format_seconds

    console = Console(file=sys.stdout, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("layout", "step", "tokens/s", "TFLOP/s", "MFU", "memory", "comm.", "bubble", "days"):
        table.add_column(name, justify="left" if name == "layout" else "right", overflow="fold")
    for line in map(summary, found.plans):
        table.add_row(
            line.layout,
            format_seconds(line.step_s),
            f"{line.tokens_per_s:,.0f}",
            f"{line.flops_per_s_per_device / 1e12:,.3g}",
            f"{line.mfu:.1%}",
            format_bytes(line.memory_bytes),
            f"{line.communication:.1%}",
            f"{line.bubble:.1%}",
            f"{line.days:.3g}",
        )
    console.print(table)
    console.print(f"\n{found.num_layouts} layouts, {found.num_fitting} fit (engine {found.engine})")
    for entry in found.rejected:
        console.print(
            f"{entry.count} rejected: {entry.reason}\n    {entry.example}: {entry.detail}\n    → {entry.instead}"
        )
