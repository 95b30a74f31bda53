"""Rank every legal layout for a run file: seconds of a step, memory, and why the first one won. Exit codes: 0 done, 2
wrong input, or nothing fits."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.inputs import add_run, located, ranked, remark, writing
from phalanx.cli.table import columns, entries, wrapped
from phalanx.errors import InputError, LayoutError, Problem
from phalanx.units import format_seconds

if TYPE_CHECKING:
    from phalanx.planner.search import Search
    from phalanx.spec.load import RunSpec

MANY_DEVICES = 1024
"""From here on a search may take more than a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx plan`."""
    add_run(parser)
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many layouts to show (10)")
    parser.add_argument("--engine", default="phalanx", help="the training system that shall run it (phalanx)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--explain", action="store_true", help="one layout in full: the best that keeps [layout]")
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    what = "print the best plan as settings of megatron-lm, nemo, torchtitan, deepspeed or accelerate"
    form.add_argument("--emit", metavar="FRAMEWORK", help=what)
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw it as one HTML page")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PLAN", help="write the best plan, as phalanx train reads it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, print, write."""
    from phalanx.planner.summary import as_json
    from phalanx.spec.load import load

    _check(arguments)
    wanted = load(arguments.run, arguments.overrides)
    if wanted.cluster.num_devices >= MANY_DEVICES:
        _first_answer(wanted, arguments.engine)
    found = ranked(wanted, top=arguments.top, engine=arguments.engine)
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(found), indent=1) + "\n")
    elif arguments.explain:
        from phalanx.planner.explain import explain

        sys.stdout.write(explain(found.plans[0], found.engine) + "\n")
    elif arguments.emit:
        _emit(found, wanted, arguments.emit)
    else:
        _show(found)
    if arguments.html:
        from phalanx.planner.page import page

        with writing(arguments.html, "--html"):
            arguments.html.write_text(page(found), encoding="utf-8")
        sys.stderr.write(f"wrote {arguments.html}\n")
    if arguments.output:
        with writing(arguments.output, "--output"):
            found.plans[0].write(arguments.output)
        sys.stderr.write(f"wrote {arguments.output}: {found.plans[0].layout}\n")
    return 0


def _emit(found: Search, wanted: RunSpec, framework: str) -> None:
    """The first plan as another framework's settings; what they do not hold, on standard error. Raises LayoutError,
    with the lines of the run file, for what it cannot express."""
    from phalanx.planner.emit import emit_first

    try:
        emitted = emit_first(found.plans, framework, found.engine)
    except LayoutError as error:
        raise LayoutError(located(error.problems, wanted)) from error
    sys.stdout.write(emitted.text + "\n")
    for line in emitted.remarks:
        remark(line)


def _check(arguments: argparse.Namespace) -> None:
    """Raise InputError for what would fail only after the search."""
    found = []
    if arguments.emit is not None:
        from phalanx.planner.frameworks import framework

        framework(arguments.emit)
    if arguments.top < 1:
        found.append(Problem(what=f"{arguments.top} layouts", where="--top", instead="1 or more"))
    for option, path in (("--html", arguments.html), ("--output", arguments.output)):
        if path is not None and path.is_dir():
            found.append(
                Problem(what=f"cannot write {path}: it is a folder", where=option, instead="the name of a file")
            )
        elif path is not None and not path.parent.is_dir():
            what = f"cannot write {path}: No such file or directory"
            found.append(Problem(what=what, where=option, instead=f"make the folder {path.parent} first"))
    if found:
        raise InputError(found)


def _first_answer(wanted: RunSpec, engine: str) -> None:
    """What is known within a second, on standard error, before a search that takes several."""
    from phalanx.planner.advice import step_s
    from phalanx.planner.search import glance

    plan = glance(wanted.model, wanted.job, wanted.cluster, wanted.layout, engine_name=engine)
    if plan is not None:
        words = f"first answer, of plain 1F1B alone: {plan.layout}, {format_seconds(step_s(plan))} a step"
        sys.stderr.write(f"{words}; now every schedule …\n")


def _show(found: Search) -> None:
    from rich.console import Console

    from phalanx.planner.summary import COLUMNS, beside, cells, heading, rejections, summaries, whole_run

    console = Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False)
    first = found.plans[0]
    rows = [("", *COLUMNS), *((str(rank), *cells(line)) for rank, line in enumerate(summaries(found), start=1))]
    head, best, *others = entries([(row[0], *row[2:]) for row in rows], [row[1] for row in rows], console.width)
    tables: dict[str, list[tuple[str, ...]]] = {}
    tables["Why the first"] = [("-", text) for text in (*found.reasons, f"{whole_run(first)} with the first")]
    tables |= {f"Beside it, by {kind}": rows for kind, rows in beside(found).items()}
    tables[f"{found.num_layouts:,} layouts, {found.num_fitting:,} fit (engine {found.engine})"] = rejections(found)
    with console.capture() as shown:  # rich has an exit code of its own for a reader that is gone
        console.print(wrapped(heading(first), console.width))
        console.print(f"\n{head}", style="dim")
        console.print(best, style="bold")
        for line in others:
            console.print(line)
        for title, texts in tables.items():
            console.print(f"\n{title}", style="bold")
            for line in columns(texts, console.width):
                console.print(line)
    sys.stdout.write(shown.get())
