"""Run the first steps of a layout and of one process, scaled down to this machine where need be, and compare: losses,
gradient norm, every parameter's gradient, copies of weights. Exit code 1 if they differ.

Float64 is the sharpest check: --set job.precision=fp64.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.cli.inputs import add_run, count_of, plan_of, with_data
from phalanx.cli.table import entries
from phalanx.spec.job import DataSpec

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.studies.compare import Finding
    from phalanx.studies.verify import Verdict

NUM_WORST, NUM_WORST_FAILED = 3, 10
"""How many comparisons are shown one by one, those nearest to their allowance; more where some are beyond it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx verify`."""
    add_run(parser, plans=True)
    what = "optimizer steps to compare (3)"
    parser.add_argument("--steps", type=count_of("steps"), default=3, metavar="N", help=what)
    what = "text to run on where the run's own data are elsewhere: a glob, or python-stdlib, which is everywhere"
    parser.add_argument("--text", metavar="GLOB", help=what)
    parser.add_argument("--json", action="store_true", help="print every comparison as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Verify, print, and say no with exit code 1."""
    from rich.console import Console

    from phalanx.studies.scaled import scaled
    from phalanx.studies.verify import as_json, verify

    plan = plan_of(arguments.run, arguments.overrides)
    if arguments.text:
        data = DataSpec(text=arguments.text, documents=plan.job.data.documents)
        plan = replace(plan, job=replace(plan.job, data=data))
    small, _ = scaled(plan)  # needs less data than one batch of a large run
    data = with_data(replace(plan, job=small.job), quiet=arguments.json).job.data
    plan = replace(plan, job=replace(plan.job, data=data))
    console = Console(file=sys.stderr if arguments.json else sys.stdout, soft_wrap=True, highlight=False)
    verdict = verify(plan, arguments.steps, console.print)
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(verdict), indent=1, allow_nan=False) + "\n")
    else:
        _show(verdict, console)
    return 0 if verdict.ok else 1


def _show(verdict: Verdict, console: Console) -> None:
    from rich.table import Table

    if verdict.changes:
        console.print("changed to fit this machine, in several micro-batches: " + ", ".join(verdict.changes))
    losses = Table("step", "loss", "on one process", "difference", box=None, pad_edge=False)
    for number, (here, there) in enumerate(verdict.losses, start=1):
        losses.add_row(str(number), f"{here:.9g}", f"{there:.9g}", f"{here - there:.1e}")
    checks = Table("check", "compared", "worst", "allowed", "verdict", box=None, pad_edge=False)
    for check, found in verdict.by_check().items():
        failed = sum(not finding.ok for finding in found)
        outcome = f"[red]{failed} differ[/red]" if failed else "agree"
        checks.add_row(check, str(len(found)), f"{found[0].error:.1e}", f"{found[0].tolerance:.1e}", outcome)
    for table in (losses, checks):
        console.print("", table)
    _show_worst(verdict.worst(NUM_WORST if verdict.ok else NUM_WORST_FAILED), console)
    number = sum(not finding.ok for finding in verdict.findings)
    what = (
        f"all {len(verdict.findings):,} comparisons agree"
        if verdict.ok
        else f"[red]{number} of {len(verdict.findings):,} comparisons differ[/red]"
    )
    console.print(f"\n{verdict.plan.layout}, {verdict.plan.job.precision}: {what}")


def _show_worst(found: Sequence[Finding], console: Console) -> None:
    """Where to look: what comes closest to what is allowed or exceeds it, and on which rank."""
    rows = [("difference", "allowed"), *((f"{finding.error:.1e}", f"{finding.tolerance:.1e}") for finding in found)]
    names = ["of", *(f"{finding.check}: {finding.name}, {finding.where}" for finding in found)]
    heading, *lines = entries(rows, names, console.width)
    console.print(f"\n{heading}", markup=False)
    for finding, line in zip(found, lines, strict=True):
        console.print(line, style="" if finding.ok else "red", markup=False)
