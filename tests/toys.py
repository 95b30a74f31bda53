"""Entries for the agent that train nothing: each rank calls one with the plan and the run folder."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta

from phalanx.errors import CommError, DataError
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.watch.events import RingWriter, ring_path

LONG_S = 300  # longer than any test: what sleeps must be ended


def rank() -> int:
    return int(os.environ["RANK"])


def speak(plan: Plan, run_dir: RunDir) -> None:
    print(f"output of rank {rank()}")
    print(f"error of rank {rank()}", file=sys.stderr)
    os.system(f"echo native output of rank {rank()}")
    if rank() > 0:
        warnings.warn("the moon is full", stacklevel=1)


def meet(plan: Plan, run_dir: RunDir) -> None:
    """All ranks find the store and each other in it, and one thread each."""
    from torch import get_num_threads
    from torch.distributed import TCPStore

    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=30)
    )
    if store.add("come", 1) == plan.layout.num_ranks:
        store.set("all here", "")
    store.wait(["all here"])
    print(f"{store.add('come', 0)} ranks met, {get_num_threads()} thread")


def kill(plan: Plan, run_dir: RunDir) -> None:
    """Rank 1 is killed while the others wait for it; rank 2 notices and complains before anybody else."""
    if rank() == 1:
        print("about to do something large")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == 2:
        raise CommError("connection closed by rank 1")
    time.sleep(LONG_S)


def fail(plan: Plan, run_dir: RunDir) -> None:
    """Rank 2 raises; rank 0 has a ring and a call under way."""
    if rank() == 2:
        time.sleep(1)  # until rank 0's ring has been copied, or is there to be
        raise ValueError("x is 3")
    if rank() == 0:
        ring = RingWriter(ring_path(run_dir.path, 0), rank=0, coords=str(plan.layout.coord(0)))
        ring.step = 7
        site = ring.site("data", (0, 1, 2), "all_reduce", "gradients", "sum", "float32")
        ring.wait(ring.begin(site, sequence=5, num_bytes=64))
    time.sleep(LONG_S)


def fail_alike(plan: Plan, run_dir: RunDir) -> None:
    raise DataError("the data is too short", instead="more of it")


def leave(plan: Plan, run_dir: RunDir) -> None:
    if rank() == 1:
        os._exit(0)
    time.sleep(LONG_S)


def crash(plan: Plan, run_dir: RunDir) -> None:
    if rank() == 1:
        ctypes.string_at(0)
    time.sleep(LONG_S)


def sleep(plan: Plan, run_dir: RunDir) -> None:
    """Say where this process is, start another, and ignore polite requests."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", str(LONG_S)])
    (run_dir.path / f"alive-{rank()}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(LONG_S)


def obey(plan: Plan, run_dir: RunDir) -> None:
    """End when asked to, as a rank without a handler of its own does."""
    (run_dir.path / f"alive-{rank()}").write_text(f"{os.getpid()}")
    time.sleep(LONG_S)
