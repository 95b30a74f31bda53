"""Under Slurm: a job that is warned saves and ends with code 75, its script requeues it, and it goes on where it was.

The test brings up a Slurm of one node in a folder of its own; it needs root, and Slurm's and munge's programs.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny import write_run_file

from phalanx.plan.layout import Layout

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")
LAYOUTS = {"two": Layout(tensor=2, micro_batch=2), "four": Layout(tensor=2, data=2, micro_batch=1)}

CONFIG = """\
ClusterName=phalanx
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
FirstJobId={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
NodeName=node NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --ntasks={num_ranks} --requeue --open-mode=append --output=log
while [ -n "$SLURM_RESTART_COUNT" ] && [ ! -e changed ]; do sleep 0.1; done
srun --ntasks={num_ranks} phalanx train run.toml --run-dir run
code=$?
echo "attempt ${{SLURM_RESTART_COUNT:-0}} ended with $code"
[ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
"""


def until(condition: Callable[[], object], what: str, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} has not come in {limit_s:g} s"
        time.sleep(0.2)


def say(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm whose daemons are children of this process. Ranks of a job meet at a port that follows from its number:
    that of the first job is one that another Slurm on this machine will hardly have."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs {', '.join(missing)}" if missing else "needs root")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, ports=ports))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    monkeypatch.setenv("SLURM_CONF", str(config))
    paths = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    munge = [f"--{'socket' if name == 'socket' else f'{name}-file'}={path}" for name, path in paths.items()]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={folder / 'key'}", *munge],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config), "-N", "node"],
    ]
    daemons = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("w") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL))
            if command[0] == "munged":
                until(paths["socket"].exists, "munge's socket", 20.0)
        try:
            until(lambda: say("sinfo", "--noheader", "--format=%T") == "idle", "a node of Slurm", 30.0)
        except AssertionError as error:
            pytest.skip(f"Slurm does not start here: {error}")
        yield
    finally:
        say("scancel", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def num_steps(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.timeout(300)  # Slurm waits between what it does
def test_warned_jobs_save_and_go_on_when_they_are_requeued(slurm: None, tmp_path: Path) -> None:
    jobs = {}
    for name, layout in LAYOUTS.items():
        folder = tmp_path / name
        folder.mkdir()
        write_run_file(folder, layout, num_steps=1_000_000)
        (folder / "job.sh").write_text(SCRIPT.format(num_ranks=layout.num_ranks))
        jobs[folder] = say("sbatch", "--parsable", f"--chdir={folder}", str(folder / "job.sh"))
        assert jobs[folder].isdigit()
    for folder, job in jobs.items():
        until(lambda: num_steps(folder) >= 3, f"a third step of {folder.name}")  # noqa: B023 (called at once)
        say("scancel", "--signal=USR1", job)
    for folder in jobs:
        log = folder / "log"
        until(lambda: "attempt 0 ended with" in log.read_text(), f"the end of {folder.name}")  # noqa: B023
        assert "attempt 0 ended with 75" in log.read_text(), log.read_text()
        (saved,) = (int(path.name.partition("-")[2]) for path in (folder / "run" / "checkpoints").glob("step-??????"))
        run_file = folder / "run.toml"
        run_file.write_text(run_file.read_text().replace("num_steps = 1000000", f"num_steps = {saved + 2}"))
        (folder / "changed").touch()  # an attempt that has come before waits for it
    for folder in jobs:
        log = folder / "log"
        until(lambda: "attempt 1 ended with" in log.read_text(), f"the second end of {folder.name}")  # noqa: B023
        assert "attempt 1 ended with 0" in log.read_text(), log.read_text()
        steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(steps[0], steps[0] + len(steps))), "each step once"
