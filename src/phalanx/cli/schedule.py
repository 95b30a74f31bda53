"""`phalanx schedule show`: draw what each pipeline stage does, and when, with the bubble and the memory it holds."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.plan.schedule import Schedule
    from phalanx.plan.walk import Walk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx schedule show`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="show")
    show = actions.add_parser("show", help="draw one schedule; a forward takes 1, a backward 2 (1 for each half)")
    show.add_argument("--schedule", default="1f1b", metavar="NAME", help="its name, as in [layout] (1f1b)")
    show.add_argument("--pipeline", type=int, required=True, metavar="N", help="size of the pipeline axis")
    show.add_argument("--micro-batches", type=int, required=True, metavar="N", help="micro-batches per step")
    show.add_argument("--virtual-stages", type=int, metavar="N", help="chunks per pipeline rank (the fewest possible)")
    show.add_argument("--svg", type=Path, metavar="FILE", help="write the drawing to an SVG file too")
    show.add_argument("--json", action="store_true", help="print actions and times as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Walk the schedule and draw it."""
    from phalanx.cli.inputs import writing
    from phalanx.plan.walk import walk
    from phalanx.watch.drawing import svg

    made = _schedule(arguments)
    times = walk(made)
    if arguments.svg:
        with writing(arguments.svg, "--svg"):
            arguments.svg.write_text(svg(made, times), encoding="utf-8")
    if arguments.json:
        peaks = [made.peak_live(coordinate) for coordinate in range(made.pipeline)]
        content = {**asdict(made), **asdict(times), "bubble": times.bubble, "peak_live": peaks}
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        _show(made, times)
    return 0


def _schedule(arguments: argparse.Namespace) -> Schedule:
    """Raises LayoutError for a schedule that does not exist in these sizes."""
    from phalanx.errors import LayoutError, Problem
    from phalanx.plan.layout import Layout
    from phalanx.plan.legality import schedule_problems
    from phalanx.plan.schedule import SCHEDULES, schedule

    name, num_micro_batches = arguments.schedule, arguments.micro_batches
    fewest = SCHEDULES[name].virtual_stages[0] if name in SCHEDULES else 1
    virtual_stages = fewest if arguments.virtual_stages is None else arguments.virtual_stages
    layout = Layout(schedule=name, pipeline=arguments.pipeline, virtual_stages=virtual_stages)
    found = schedule_problems(layout)
    if num_micro_batches < 1:
        what = f"{num_micro_batches} micro-batches"
        found.append(Problem(what=what, where="layout.micro_batches", instead="1 or more"))
    if found:
        raise LayoutError(replace(p, where=p.where.replace("layout.", "--").replace("_", "-")) for p in found)
    return schedule(name, layout.pipeline, virtual_stages, num_micro_batches)


def _show(made: Schedule, times: Walk) -> None:
    from rich.console import Console

    from phalanx.watch.drawing import facts, legend, lines

    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    for line in lines(made, times, console.width):
        console.print(line)
    console.print(f"{legend(made)}\n{facts(made, times)}")
