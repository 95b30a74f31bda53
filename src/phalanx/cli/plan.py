"""`phalanx plan`: rank every legal layout for a run file."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.inputs import add_run, ranked, writing
from phalanx.errors import InputError

if TYPE_CHECKING:
    from phalanx.planner.search import Search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx plan`."""
    add_run(parser)
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many layouts to show (10)")
    parser.add_argument("--engine", default="phalanx", help="the training system that shall run it (phalanx)")
    parser.add_argument("--explain", action="store_true", help="one layout in full: the best that keeps [layout]")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw it as one HTML page")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PLAN", help="write the best plan, as phalanx train reads it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, print, write."""
    from phalanx.planner.explain import explain
    from phalanx.planner.page import page
    from phalanx.planner.summary import as_json
    from phalanx.spec.load import load

    if arguments.top < 1:
        raise InputError(f"{arguments.top} layouts", where="--top", instead="1 or more")
    found = ranked(load(arguments.run, arguments.overrides), top=arguments.top, engine=arguments.engine)
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(found), indent=1) + "\n")
    elif arguments.explain:
        sys.stdout.write(explain(found.plans[0]) + "\n")
    else:
        _show(found)
    if arguments.html:
        with writing(arguments.html, "--html"):
            arguments.html.write_text(page(found), encoding="utf-8")
    if arguments.output:
        with writing(arguments.output, "--output"):
            found.plans[0].write(arguments.output)
    return 0


def _show(found: Search) -> None:
    from rich.console import Console

    from phalanx.planner.summary import rejections, whole_run

    console = Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False)
    head, *rows = _table(found, console.width)
    console.print(head, style="dim")
    for number, row in enumerate(rows):
        console.print(row, style="" if number else "bold")
    words = [*found.reasons, f"{whole_run(found.plans[0])} with the first"]
    console.print("\n" + "\n".join(_wrapped(text, "", console.width) for text in words))
    console.print(f"\n{found.num_layouts:,} layouts, {found.num_fitting:,} fit (engine {found.engine})")
    for text in rejections(found):
        console.print("\n".join(_wrapped(line, "", console.width) for line in text.splitlines()))


def _table(found: Search, width: int) -> list[str]:
    """Heading and one entry per layout: numbers, then the layout; beneath them where a line is too narrow for both."""
    from phalanx.planner.summary import COLUMNS, cells, summaries

    layouts = [line.layout for line in summaries(found)]
    numbers: list[tuple[str, ...]] = [("", *COLUMNS[1:])]
    numbers += [(str(rank), *cells(line)[1:]) for rank, line in enumerate(summaries(found), start=1)]
    widths = [max(len(row[column]) for row in numbers) for column in range(len(numbers[0]))]
    rows = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in numbers]
    if len(rows[0]) + 2 + max(map(len, layouts)) <= width:
        return [f"{row}  {text}" for row, text in zip(rows, [COLUMNS[0], *layouts], strict=True)]
    indent = " " * (widths[0] + 2)
    return [rows[0], *(f"{row}\n{_wrapped(text, indent, width)}" for row, text in zip(rows[1:], layouts, strict=True))]


def _wrapped(text: str, indent: str, width: int) -> str:
    """`text` in lines of at most `width`, further ones two columns deeper than its own indentation and `indent`."""
    own = indent + " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(
        text.strip(),
        width,
        initial_indent=own,
        subsequent_indent=own + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
