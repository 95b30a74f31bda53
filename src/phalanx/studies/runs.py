"""Run a plan here, as one part of a study."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import RunError
from phalanx.launch import local
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir


def run(plan: Plan, run_dir: RunDir, entry: str = local.WORKER, environ: Mapping[str, str] | None = None) -> None:
    """Run `entry` on every rank of `plan`, in `run_dir` and with `environ` over the environment, to its end.

    Raises RunError, with the run's exit code, if it fails or is asked to end.
    """
    with run_dir.lock():
        plan.write(run_dir.plan)
        result = local.start(run_dir.plan, run_dir, entry, environ)
    if result.exit_code:
        error = RunError(str(result.failure or "the run was ended"))
        error.exit_code = result.exit_code
        raise error
