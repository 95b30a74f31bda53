"""Start the processes of a run on this machine, through one agent, and wait for them. Loads no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from phalanx.errors import Stopped
from phalanx.launch import supervise
from phalanx.launch.port import listen
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir

WORKER = "phalanx.trainer.loop:train"

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals to the process that starts ranks, which passes them on."""

# One thread per process: the ranks share the cores, and a process with idle threads must not be forked.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended: 0 done, 128 + n if it was asked to end by signal n, otherwise the exit code of the error that
    ended it (2 wrong input, 3 anything else); `failure` then says why."""

    exit_code: int
    failure: supervise.Failure | None = None


def start(plan_path: Path, run_dir: RunDir, entry: str = WORKER, environ: Mapping[str, str] | None = None) -> Result:
    """Run `entry` ("module:function", called with the Plan and the RunDir) in one process per rank of the plan, with
    `environ` over the environment; return when all are gone. Requests to end are passed on; if this process is killed,
    so are the others.

    A failure is written to the run folder and returned. Raises InputError, before any process starts, for a file that
    is not a plan, an entry that cannot be loaded, or a port asked for (MASTER_PORT) that is in use.
    """
    plan = Plan.read(plan_path)
    run_dir.create()
    run_dir.forget_last_attempt()
    with listen(os.environ.get("MASTER_PORT")) as listener:
        listener.set_inheritable(True)
        command = [sys.executable, "-m", "phalanx.trainer.agent", str(plan_path), str(run_dir.path), entry]
        command += ["--parent", str(os.getpid()), "--listener", str(listener.fileno())]
        exit_code = _run_agent(command, environ or {})
    # Done; refused before any rank started, and said so; or asked to stop.
    if exit_code in (0, 2, Stopped.exit_code) or exit_code > 128:
        return Result(exit_code=exit_code)
    failure = supervise.collect(plan.layout, run_dir, agent_exit_code=exit_code)
    try:
        supervise.write(failure, run_dir)
    except OSError as error:
        sys.stderr.write(f"the report is not kept: {error}\n")
    return Result(exit_code=failure.exit_code, failure=failure)


def _run_agent(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the agent to its end, passing signals on. Returns its exit code, or -n if signal n killed it.

    Signals are held back until there is somebody to pass them on to; the agent starts with them held back as well, so
    that none can strike it before it is ready.
    """
    held_before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    previous = {}
    try:
        agent = subprocess.Popen(
            command,
            env={**os.environ, **_ONE_THREAD, **environ},
            stdin=subprocess.DEVNULL,
            close_fds=False,  # the listener and the run folder's lock are inheritable, nothing else is
            start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
        )

        def forward(number: int, frame: FrameType | None) -> None:
            agent.send_signal(number)

        previous = {number: signal.signal(number, forward) for number in FORWARDED}
        signal.pthread_sigmask(signal.SIG_SETMASK, held_before)
        return agent.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, held_before)
