"""List checkpoints, verify that each byte is as it was written, or make new ones of them and of Hugging Face folders.
Exit codes: 0 done, 1 something is damaged, 2 wrong input."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli import rewrite
from phalanx.cli.table import entries

if TYPE_CHECKING:
    from phalanx.checkpoint.survey import Seen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|verify|export|import|average|reshard")
    for name, what in (
        ("list", "step, age, size and layout of each checkpoint, and whether its files are all there in full"),
        ("verify", "read everything and compare all checksums; exit code 1 if anything is wrong"),
    ):
        action = actions.add_parser(name, help=what, description=what)
        action.add_argument("path", type=Path, help="a run folder, a folder of checkpoints, or one checkpoint")
        action.add_argument("--json", action="store_true", help="print JSON")
    rewrite.add_actions(actions)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    if arguments.action in rewrite.ACTIONS:
        return rewrite.run(arguments)
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from phalanx.checkpoint.survey import locate, survey

    contents, found = arguments.action == "verify", []
    columns = (TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not contents) as progress:
        for step, path in locate(arguments.path):
            task = progress.add_task(f"reading {path.name}", total=None)
            on_bytes = functools.partial(progress.advance, task)
            seen = survey(step, path, contents=contents, on_bytes=on_bytes)
            if path.exists():  # a run that goes on may have deleted it meanwhile: then it is neither whole nor damaged
                found.append(seen)
            progress.remove_task(task)
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(entry) for entry in found]) + "\n")
    else:
        _show(found, contents)
    return int(contents and any(entry.problems for entry in found))


def _show(found: list[Seen], contents: bool) -> None:
    from rich.console import Console

    from phalanx.units import format_bytes

    rows = [("step", "written (UTC)", "size", "whole")]
    for entry in found:
        whole = "damaged" if entry.problems else "all checksums match" if contents else "all files there"
        written = entry.written_at.replace("T", " ").removesuffix("+00:00")
        rows.append((str(entry.step), written, format_bytes(entry.num_bytes) if entry.num_bytes else "", whole))
    for text in entries(rows, ["layout", *(entry.layout for entry in found)], Console().width):
        sys.stdout.write(f"{text}\n")
    for entry in found:
        for problem in entry.problems:
            sys.stdout.write(f"{problem}\n")
