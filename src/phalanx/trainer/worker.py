"""The worker: one rank of a run whose processes torchrun or srun started; `trainer.agent` looks after those that it
starts itself."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks of a node share its cores; read when torch is loaded

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from phalanx.errors import Stopped
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer import process
from phalanx.trainer.loop import train
from phalanx.watch.events import copy_ring, in_words, read_ring, remove_dead_rings, ring_path


def work(
    plan: Plan, run_dir: RunDir, rank: int, entry: process.Entry = train, explain: Callable[[], str] | None = None
) -> NoReturn:
    """Be rank `rank` of a run whose processes somebody else started: log always, speak only as rank 0.

    When it has failed, `explain()` says what it is to tell for all ranks, and the rest stands in its log; without it,
    every rank tells its own error.
    """
    process.die_with_parent(os.getppid(), signal.SIGKILL)
    process.keep_freed_memory()
    terminal = os.dup(2)
    (process.write_to if rank else process.write_to_both)(run_dir.log(rank))
    process.dump_stacks_on_request(run_dir.stack(rank))
    remove_dead_rings()
    outcome = process.run(entry, plan, run_dir, rank)
    if outcome.exit_code == Stopped.exit_code:  # rank 0 has said so, and nothing went wrong
        ring_path(run_dir.path, rank).unlink(missing_ok=True)
    elif outcome.error:
        if explain:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all of us when the first one has left
            process.hang_up(keep=[terminal])
            process.write_to(run_dir.log(rank))
        own = outcome.error.text + "\n" if outcome.error.for_users else outcome.error.traceback
        try:
            sys.stderr.write(own)
            _keep_ring(run_dir, rank)
            text = explain() if explain else ""
        except OSError as error:  # a full disk: nobody else will read there what happened here
            text = f"rank {rank}: {own}{run_dir.path} cannot be written to: {error}"
        if text:
            os.write(terminal, f"phalanx: {text}\n".encode())
    if not run_dir.stack(rank).stat().st_size:
        run_dir.stack(rank).unlink()
    sys.stderr.flush()
    os._exit(outcome.exit_code)  # not through the interpreter's end, where threads of a broken group can hang


def _keep_ring(run_dir: RunDir, rank: int) -> None:
    """Say where this rank last was, and keep the record of it: there is no agent to do either."""
    ring = ring_path(run_dir.path, rank)
    if ring.exists():
        copy_ring(ring, run_dir.ring(rank))
        sys.stderr.write(f"{in_words(read_ring(ring))}\n")
        ring.unlink()
