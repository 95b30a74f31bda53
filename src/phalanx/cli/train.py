"""Train what a run file or a plan describes. Starts one process per rank here; under torchrun or srun it is itself one
of the ranks. Exit codes: 0 done, 2 wrong input, 3 the run failed, 128 + n ended by signal n."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from phalanx.checkpoint.folder import find
from phalanx.cli.inputs import add_run, check_start, plan_of, resumed, source_of, with_data, writing
from phalanx.errors import InputError
from phalanx.launch import environment, fold, local
from phalanx.launch.port import listen
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir, file_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx train`."""
    add_run(parser, plans=True)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (default: runs/<model>-<date>-<time>)")
    parser.add_argument(
        "--resume",
        metavar="auto|never|PATH",
        help="go on from the newest checkpoint in the run folder, if it has one (auto); start anew; or from that one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan if need be, then train; returns the exit code."""
    launched = environment.launched()
    if launched:
        return _work(arguments, launched)
    plan = _plan(arguments, None)
    environment.check_alone(plan.layout.num_ranks, plan.cluster.devices_per_node)
    given = RunDir(arguments.run_dir) if arguments.run_dir else None
    if given:
        given.check()
    check_start(plan, arguments.run, arguments.overrides, given)
    plan = with_data(plan)  # last, as building token files may take long
    run_dir = given or RunDir.default(plan.model.name)
    with run_dir.lock():
        with writing(run_dir.plan, "--run-dir"):
            plan.write(run_dir.plan)
        _announce(plan, run_dir)
        result = local.start(run_dir.plan, run_dir)
    if result.failure:
        sys.stderr.write(f"phalanx: {result.failure}\n")
    elif result.exit_code > 128:
        saved = "" if find(run_dir.checkpoints) else f"; nothing is saved yet in {run_dir.path}"
        sys.stderr.write(f"phalanx: ended by {signal.Signals(result.exit_code - 128).name}{saved}\n")
    return result.exit_code


def _announce(plan: Plan, run_dir: RunDir) -> None:
    """Say what is about to be trained, where, and on what."""
    sys.stdout.write(f"{plan.layout}; run folder {run_dir.path}\n")
    for line in source_of(plan).describe(plan.job.num_steps):
        sys.stdout.write(f"data: {line}\n")
    sys.stdout.flush()


def _work(arguments: argparse.Namespace, launched: environment.Launched) -> int:
    """Be one of the ranks that torchrun or srun started. What is wrong on all of them is said once per node."""
    try:
        plan = _plan(arguments, launched)
        folder = arguments.run_dir or Path("runs") / environment.run_name(launched, file_name(plan.model.name))
        RunDir(folder).check()
        check_start(plan, arguments.run, arguments.overrides, RunDir(folder))
        plan = with_data(plan, quiet=launched.local_rank > 0)
        if launched.port:
            listen(launched.port).close()  # is it free?
    except InputError as error:
        environment.tell_torchrun(str(error))
        if launched.local_rank:
            return error.exit_code
        raise
    run_dir = RunDir(folder)
    with contextlib.ExitStack() as stack:
        if launched.rank == 0:
            stack.enter_context(run_dir.lock())
            run_dir.forget_last_attempt()
            plan.write(run_dir.plan)
            _announce(plan, run_dir)
        run_dir.create()
        from phalanx.trainer.worker import work

        def explain() -> str:
            text = fold.report(plan.layout, run_dir, launched.rank)
            if text:
                environment.tell_torchrun(text)
            return text

        return work(plan, run_dir, launched.rank, explain=explain)


def _plan(arguments: argparse.Namespace, launched: environment.Launched | None) -> Plan:
    """The plan with all that a worker needs but the data; nothing reaches it from elsewhere."""
    return resumed(plan_of(arguments.run, arguments.overrides, launched), arguments.resume)
