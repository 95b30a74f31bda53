"""Train a run, then its first steps on one process, and hold the two against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.studies.compare import TOLERANCES, relative_error
from phalanx.studies.runs import run
from phalanx.watch import metrics
from phalanx.watch.metrics import StepRecord

NUM_COMPARED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """What came of it: the `records` of the whole run, the first ones of one process, and where files are."""

    plan: Plan
    records: tuple[StepRecord, ...]
    alone: tuple[StepRecord, ...]
    checkpoint: Path
    metrics: Path

    @property
    def tokens_per_s(self) -> float:
        """Of the median step, the first one left out."""
        return self.plan.job.tokens_per_step / metrics.steady(self.records)

    def errors(self) -> list[tuple[float, float]]:
        """Of each step that both ran: how far its loss is from that of one process, relative, and how far it may be."""
        allowed = TOLERANCES[self.plan.job.precision]
        pairs = zip(self.records, self.alone, strict=False)
        return [
            (relative_error(here.loss, there.loss), allowed.later if number else allowed.total)
            for number, (here, there) in enumerate(pairs)
        ]

    @property
    def ok(self) -> bool:
        """Whether all of these losses are equal but for rounding."""
        return all(error <= allowed for error, allowed in self.errors())


def demonstrate(plan: Plan, run_dir: RunDir, say: Callable[[str], None] = lambda line: None) -> Demonstration:
    """Train `plan`, whose data is there, in `run_dir`, and its first steps on one process in a folder inside it.

    Raises RunError if either fails.
    """
    say(f"{plan.layout}: {plan.layout.num_ranks} processes, run folder {run_dir.path}")
    run(plan, run_dir)
    first = _first_steps(plan)
    say(f"the first {first.job.num_steps} steps on one process")
    one = RunDir(run_dir.path / "one-process")
    run(first, one)
    return Demonstration(
        plan=plan,
        records=tuple(metrics.read(run_dir.metrics)),
        alone=tuple(metrics.read(one.metrics)),
        checkpoint=run_dir.checkpoint(plan.job.num_steps),
        metrics=run_dir.metrics,
    )


def _first_steps(plan: Plan) -> Plan:
    """The first steps of `plan` on one process: those whose losses do not depend on how many follow, since the learning
    rate's curve, which does, begins after warm-up and the step that follows it."""
    job = plan.job
    num_steps = min(NUM_COMPARED, job.num_steps, job.optimizer.warmup_steps + 2)
    layout = Layout(micro_batch=plan.layout.micro_batch)
    return replace(plan, job=replace(job, num_steps=num_steps), layout=layout, prediction=None)
