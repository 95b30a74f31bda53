"""Who started this process: nobody in particular, or torchrun or srun as one rank of many; and whether what they
started fits what the run needs. Found out, and complained about, before anything can hang.

`trainer.world` reads the same variables when it joins; here they are only checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from phalanx.errors import InputError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_GPU_FILES = ("nvidia[0-9]*", "kfd")  # in /dev: where there is none, no GPU need be looked for
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # as environment of processes: they see none

_SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process is rank `rank` of `num_ranks` that `by` started on `num_nodes` nodes, `local_rank` on its node.

    `port`: where it is to serve the ranks' store, if it is and somebody said where.
    """

    by: Literal["torchrun", "srun"]
    rank: int
    local_rank: int
    num_ranks: int
    num_nodes: int
    port: str | None = None

    def command(self, num_ranks: int) -> str:
        """What starts the right number of processes."""
        if self.by == "srun":
            return f"srun --ntasks={num_ranks} phalanx train …, and in a batch script #SBATCH --ntasks={num_ranks}"
        nodes = f"--nnodes {self.num_nodes} " if self.num_nodes > 1 else ""
        return f"torchrun {nodes}--nproc-per-node {max(1, num_ranks // self.num_nodes)} --no-python phalanx train …"

    def check_num_ranks(self, needed: int) -> None:
        """Raises InputError if there are more or fewer processes than the layout has ranks."""
        if self.num_ranks != needed:
            raise InputError(
                f"{self._started()}, the layout needs {needed}",
                instead=f"start {needed}: {self.command(needed)}",
            )

    def check_multiple(self, unit: int) -> None:
        """Raises InputError if the processes cannot be dealt out to groups of `unit`, the product of the axes given."""
        if self.num_ranks % unit:
            near = max(unit, self.num_ranks // unit * unit)
            raise InputError(
                f"the layout needs a multiple of {unit} processes, got {self.num_ranks} ({self._started()})",
                instead=f"start {near}: {self.command(near)}",
            )

    def _started(self) -> str:
        return (
            f"Slurm started {_counted(self.num_ranks, 'task')}"
            if self.by == "srun"
            else f"torchrun started {_counted(self.num_ranks, 'process')}"
        )


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Who started this process as one rank of several; None if nobody did.

    Raises InputError for variables that are incomplete, not numbers, or contradict each other.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        rank, num_ranks, local_rank = _numbers(environ, _TORCHRUN[:3])
        _complete(environ, _TORCHRUN)
        (per_node,) = _numbers({"LOCAL_WORLD_SIZE": str(num_ranks), **environ}, ("LOCAL_WORLD_SIZE",))
        num_nodes = max(1, num_ranks // max(1, per_node))
        by: Literal["torchrun", "srun"] = "torchrun"
    elif "SLURM_STEP_ID" in environ:  # set by srun for each task; a batch script alone has only the job's variables
        rank, num_ranks, local_rank = _numbers(environ, _SRUN)
        (num_nodes,) = _numbers({"SLURM_NNODES": "1", **environ}, ("SLURM_NNODES",))
        by = "srun"
    else:
        return None
    if not 0 <= rank < num_ranks:
        raise InputError(f"rank {rank} of {num_ranks} processes", where="environment", instead="ranks count from 0")
    serves = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Launched(
        by=by,
        rank=rank,
        local_rank=local_rank,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        port=environ.get("MASTER_PORT") if serves else None,
    )


def check_alone(num_ranks: int, devices_per_node: int, environ: Mapping[str, str] = os.environ) -> None:
    """Nobody started this process as a rank, so it starts all of them on this node.

    Raises InputError if the plan is for several nodes, or if this is a Slurm job that was given, or meant to be given,
    several tasks, which would then stay idle.
    """
    if num_ranks > devices_per_node:
        raise InputError(
            f"the layout has {num_ranks} ranks, a node {devices_per_node} devices, and this starts one node's",
            instead=f"start it on all nodes with srun or torchrun, or plan for {devices_per_node} devices",
        )
    if "SLURM_JOB_ID" not in environ or "SLURM_NTASKS" not in environ:
        return
    values = {"SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": environ["SLURM_NTASKS"], **environ}
    num_tasks, num_nodes, per_node = _numbers(values, ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"))
    if num_tasks == num_nodes == per_node == 1:
        return
    raise InputError(
        f"Slurm started {_counted(num_tasks, 'task')} on {_counted(num_nodes, 'node')} (per node: {per_node}), the "
        f"layout needs {num_ranks}, and this process is none of srun's",
        where="SLURM_NTASKS",
        instead=f"#SBATCH --ntasks={num_ranks}, and in the script: srun phalanx train …",
    )


def tell_torchrun(text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Why this process is about to fail, for the end of torchrun's own report. Nothing shortens that, but it ends with
    what stands in the file that each process was given for this (torch.distributed.elastic.multiprocessing.errors)."""
    if path := environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # it has been told already
            Path(path).write_text(json.dumps({"message": error}))


def num_gpus(devices: Path = Path("/dev")) -> int:
    """GPUs that a process started here can use. Torch is asked, which alone knows, in a process of its own: loading it
    takes seconds, and only where the system has GPUs at all."""
    if not any(any(devices.glob(name)) for name in _GPU_FILES):
        return 0
    program = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout)


def run_name(found: Launched, name: str, environ: Mapping[str, str] = os.environ) -> str:
    """A name for the run folder that every rank comes to without asking another.

    Under Slurm it is that of the job and its step, so that a requeued job continues in its folder; under torchrun, on
    one node, the time at which torchrun started. Raises InputError where there is no such thing.
    """
    if "SLURM_JOB_ID" in environ:
        return f"{name}-slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', 'batch')}"
    if found.num_nodes > 1:
        raise InputError(
            "several nodes need to agree on a run folder", instead="give one that all of them reach with --run-dir"
        )
    return f"{name}-{datetime.fromtimestamp(_start_time(os.getppid())):%Y%m%d-%H%M%S}"


def _start_time(pid: int) -> int:
    """When a process started, in Unix time (proc(5): ticks since boot, and the time of the boot)."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot.split()[1]) + ticks // os.sysconf("SC_CLK_TCK")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def _complete(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        present = ", ".join(name for name in names if name in environ)
        raise InputError(
            f"{present} is set but {', '.join(missing)} is not",
            where="environment",
            instead="start with torchrun, which sets all of them, or unset them to start here",
        )


def _numbers(environ: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    """The values of variables that must be whole numbers."""
    _complete(environ, names)
    for name in names:
        if not environ[name].isdecimal():
            raise InputError(f"{name} is '{environ[name]}'", where="environment", instead="a whole number")
    return [int(environ[name]) for name in names]
