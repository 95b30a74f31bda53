"""Whether a layout computes what one process computes: both run the same first steps here, and everything that must
not depend on the layout is compared.

Compared are the loss of every step; in the first step the gradient norm and every parameter's gradient as the optimizer
gets it (whole, over all stages, slices and copies; before clipping); initial weights, to the bit; after the last step
all copies of a weight with each other, to the bit; that weight decay shrinks matrices and nothing else; that learning
rate, clipping, loss and norm are the same numbers on all ranks; and that every sequence is trained on once.

Three things differ from training. Part of the labels are not supervised, unevenly (`trainer.record.uneven`), so that
micro-batches and data ranks have unequal numbers of tokens. The learning rate is constant: warm-up would hide the
updates. A model that is too large for this machine is scaled down (`studies.scaled`); if its vocabulary shrinks, token
ids are folded into it.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.launch import environment
from phalanx.plan.layout import Layout
from phalanx.plan.legality import problems
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.studies.compare import Finding, compare
from phalanx.studies.runs import run
from phalanx.studies.scaled import scaled
from phalanx.watch.records import RankRecord

WORKER = "phalanx.trainer.record:record"
NUM_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome: `plan` is what ran, `changes` how it differs from the plan given, `losses` those of each step, of
    the layout and of one process."""

    plan: Plan
    changes: tuple[str, ...]
    losses: tuple[tuple[float, float], ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than it may."""
        return all(finding.ok for finding in self.findings)

    def by_check(self) -> dict[str, list[Finding]]:
        """The findings of each kind, the worst first."""
        kinds: dict[str, list[Finding]] = {}
        for finding in sorted(self.findings, key=lambda finding: -finding.severity):
            kinds.setdefault(finding.check, []).append(finding)
        return {kind: kinds[kind] for kind in dict.fromkeys(finding.check for finding in self.findings)}

    def worst(self, count: int) -> list[Finding]:
        """The `count` findings that come closest to their tolerance or exceed it; gradients before others."""
        order = sorted(self.findings, key=lambda finding: (-finding.severity, finding.check != "gradients"))
        return order[:count]


def verify(plan: Plan, num_steps: int = NUM_STEPS, say: Callable[[str], None] = lambda line: None) -> Verdict:
    """Run `plan`, whose data is there, and one process, and compare. `say` is told what runs.

    Raises RunError if a run fails; its folder then stays.
    """
    small, changes = scaled(plan)
    optimizer = replace(small.job.optimizer, warmup_steps=0, schedule="constant")
    small = replace(small, job=replace(small.job, num_steps=num_steps, optimizer=optimizer))
    found = problems(small.model, small.job, small.cluster, small.layout)
    assert not found, f"scaled down to what cannot run: {found}"
    alone = replace(small, layout=Layout(micro_batch=small.job.global_batch))
    steps = f"{num_steps} steps" if num_steps > 1 else "1 step"
    num_gpus, num_ranks = environment.num_gpus(), small.layout.num_ranks
    on_cpu = 0 < num_gpus < num_ranks
    environ = environment.NO_GPUS if on_cpu else {}
    if on_cpu:
        say(f"on the CPU, as there are fewer GPUs ({num_gpus}) than ranks ({num_ranks})")
    say(f"{steps} with {small.layout}")
    ranks = _record(small, environ)
    say(f"{steps} on one process, in one micro-batch")
    [reference] = _record(alone, environ)
    findings = tuple(compare(small, ranks, reference))
    losses = tuple((here.loss, there.loss) for here, there in zip(ranks[0].steps, reference.steps, strict=True))
    return Verdict(plan=small, changes=changes, losses=losses, findings=findings)


def _record(plan: Plan, environ: Mapping[str, str]) -> list[RankRecord]:
    """Run the plan in a folder of its own, with `environ` over the environment; what all ranks recorded."""
    run_dir = RunDir(Path(tempfile.mkdtemp(prefix="phalanx-verify-")))
    run(plan, run_dir, WORKER, environ)
    records = [RankRecord.read(run_dir.record(rank)) for rank in range(plan.layout.num_ranks)]
    shutil.rmtree(run_dir.path)
    return records


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict in plain values, findings worst first; a number that is not finite becomes null."""
    findings = verdict.worst(len(verdict.findings))
    return {
        "ok": verdict.ok,
        "layout": asdict(verdict.plan.layout),
        "precision": verdict.plan.job.precision,
        "changes": list(verdict.changes),
        "losses": [
            {"step": number, "layout": _finite(here), "one_process": _finite(there)}
            for number, (here, there) in enumerate(verdict.losses, start=1)
        ],
        "findings": [{**asdict(finding), "error": _finite(finding.error), "ok": finding.ok} for finding in findings],
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
