"""Draw what each pipeline stage does, and when: in units of work, or in predicted and measured seconds, the two above
each other. Exit codes: 0 done, 2 wrong input."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import InputError, LayoutError, Problem

if TYPE_CHECKING:
    from phalanx.plan.layout import Layout
    from phalanx.plan.schedule import Schedule
    from phalanx.watch.drawing import Drawing

SIZES = ("schedule", "pipeline", "micro_batches", "virtual_stages")
MOST_DRAWN = 50_000  # micro-batches × stages
SHOW = """Draw what each pipeline stage does, and when. Name one of three things: the sizes of a schedule (--pipeline 4
--micro-batches 8 --schedule zb-h1), drawn in units of work, where a forward takes 1 and a backward 2; a plan (--plan),
drawn with the times that it predicts; or a run (--run), drawn twice, as predicted and as measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx schedule show`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="show")
    show = actions.add_parser("show", help="draw one schedule", description=SHOW)
    show.add_argument("--schedule", metavar="NAME", help="its name, as in [layout] (1f1b)")
    show.add_argument("--pipeline", type=int, metavar="N", help="size of the pipeline axis")
    show.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches per step")
    show.add_argument("--virtual-stages", type=int, metavar="N", help="chunks per pipeline rank (the fewest possible)")
    show.add_argument("--plan", type=Path, metavar="PLAN", help="draw a plan.json's schedule, with predicted times")
    show.add_argument("--run", type=Path, metavar="RUN_DIR", help="draw a run's, predicted above measured")
    show.add_argument("--svg", type=Path, metavar="FILE", help="write the drawing to an SVG file too")
    show.add_argument("--json", action="store_true", help="print actions and times as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Walk the schedule and draw it."""
    from phalanx.cli.inputs import writing
    from phalanx.watch.drawing import svg

    made, drawings = _of_plan(arguments) if arguments.plan or arguments.run else _of_sizes(arguments)
    if arguments.svg:
        with writing(arguments.svg, "--svg"):
            arguments.svg.write_text(svg(made, drawings), encoding="utf-8")
    if arguments.json:
        peaks = [made.peak_live(coordinate) for coordinate in range(made.pipeline)]
        times = {d.name: {**asdict(d.walk), "bubble": d.walk.bubble} for d in drawings}
        content = {**asdict(made), "peak_live": peaks, **times.pop("", {}), **times}
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        _show(made, drawings)
    return 0


def _of_sizes(arguments: argparse.Namespace) -> tuple[Schedule, list[Drawing]]:
    """Raises LayoutError for a schedule that does not exist in these sizes."""
    from phalanx.plan.layout import Layout
    from phalanx.plan.legality import schedule_problems
    from phalanx.plan.schedule import SCHEDULES
    from phalanx.plan.walk import walk
    from phalanx.watch.drawing import Drawing

    for size in ("pipeline", "micro_batches"):
        if getattr(arguments, size) is None:
            raise InputError(f"--{size.replace('_', '-')} is missing", instead="give it a number; or --plan, or --run")
    name = arguments.schedule or "1f1b"
    fewest = SCHEDULES[name].virtual_stages[0] if name in SCHEDULES else 1
    virtual_stages = fewest if arguments.virtual_stages is None else arguments.virtual_stages
    layout = Layout(schedule=name, pipeline=arguments.pipeline, virtual_stages=virtual_stages)
    found = schedule_problems(layout)
    if arguments.micro_batches < 1:
        what = f"{arguments.micro_batches} micro-batches"
        found.append(Problem(what=what, where="layout.micro_batches", instead="1 or more"))
    if found:
        raise LayoutError(replace(p, where=p.where.replace("layout.", "--").replace("_", "-")) for p in found)
    made = _schedule(layout, arguments.micro_batches)
    return made, [Drawing(walk=walk(made))]


def _of_plan(arguments: argparse.Namespace) -> tuple[Schedule, list[Drawing]]:
    """Of a plan, or of the one in a run's folder; raises InputError if sizes are given too, or nothing was measured."""
    from phalanx.cli.inputs import plan_of
    from phalanx.planner.engine import OURS, engine
    from phalanx.planner.estimate import pipeline_walk
    from phalanx.rundir import RunDir
    from phalanx.watch.actions import measured
    from phalanx.watch.drawing import Drawing

    given = [f"--{size.replace('_', '-')}" for size in SIZES if getattr(arguments, size) is not None]
    if given:
        raise InputError(f"{given[0]} beside a plan, which has its own", instead="leave one of them out")
    plan = plan_of(arguments.plan or RunDir(arguments.run).plan, ())
    count = plan.layout.num_micro_batches(plan.job.global_batch)
    made = _schedule(plan.layout, count)
    drawings = [Drawing(walk=pipeline_walk(plan, engine(OURS, plan.job), count), name="predicted")]
    if arguments.run:
        step, walk = measured(RunDir(arguments.run), plan.layout, made)
        drawings.append(Drawing(walk=walk, name=f"measured in step {step}"))
    return made, drawings


def _schedule(layout: Layout, num_micro_batches: int) -> Schedule:
    """Raises InputError for one that would take minutes to draw."""
    from phalanx.plan.schedule import schedule

    if num_micro_batches * layout.num_stages > MOST_DRAWN:
        what = f"{num_micro_batches:,} micro-batches on {layout.num_stages:,} stages are too many to draw"
        raise InputError(what, instead=f"a product of at most {MOST_DRAWN:,}")
    return schedule(layout.schedule, layout.pipeline, layout.virtual_stages, num_micro_batches)


def _show(made: Schedule, drawings: list[Drawing]) -> None:
    from rich.console import Console

    from phalanx.watch.drawing import facts, legend, lines

    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    for line in lines(made, drawings, console.width):
        console.print(line)
    console.print(legend(made))
    if not drawings[0].name:
        console.print(facts(made, drawings[0].walk))
