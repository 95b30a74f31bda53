"""`phalanx train` for real: started here, by torchrun, stopped in the middle, and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny import write_run_file

from phalanx.cli.main import main
from phalanx.plan.layout import Layout

BIN = Path(sys.executable).parent
FOREVER = ["--set", "job.num_steps=1000000"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    write_run_file(tmp_path, Layout(tensor=2, micro_batch=2), num_steps=3)


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, timeout=110)


def plain() -> str:
    """What run.toml says without its checkpoints."""
    return Path("run.toml").read_text().partition("[checkpoint]")[0]


def refused_start(capsys: pytest.CaptureFixture[str], start: str, *changes: str) -> str:
    """The complaint about weights to start with, which names their line; no run folder is left."""
    Path("run.toml").write_text(f'{plain()}[checkpoint]\ninit_from = "{start}"\n')
    assert main(["train", "run.toml", "--run-dir", "second", *changes]) == 2
    complaint = capsys.readouterr().err
    assert f"phalanx: run.toml:{len(plain().splitlines()) + 2}: checkpoint.init_from: " in complaint
    assert not Path("second").exists()
    return complaint


def test_weights_that_cannot_be_started_with_are_refused_before_any_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("empty").mkdir()
    for folder, wrong in (("nothing", "there is no such folder"), ("empty", "there are no weights")):
        assert f"{folder}: {wrong}" in refused_start(capsys, folder)
    first = ("phalanx", "train", "run.toml", "--run-dir", "first", "--set")
    Path("run.toml").write_text(plain())
    assert command(*first, "job.num_steps=1").returncode == 0
    assert "hidden" in refused_start(capsys, "first", "--set", "model.hidden=64", "--set", "model.head_dim=16")
    refused_start(capsys, "nothing")
    again = command(*first, "job.num_steps=2")
    assert again.returncode == 0, again.stderr  # what a run goes on from comes before what it could start with


def losses(folder: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def test_started_here_and_by_torchrun_alike():
    here = command("phalanx", "train", "run.toml", "--run-dir", "here")
    assert here.returncode == 0, here.stderr
    assert here.stdout.count("step ") == 3
    there = command("torchrun", "--nproc-per-node=2", "--no-python", "phalanx", "train", "run.toml", "--run-dir=there")
    assert there.returncode == 0, there.stderr
    assert there.stdout.count("step ") == 3, "rank 0 speaks, rank 1 does not"
    assert losses("here") == losses("there")
    for folder in ("here", "there"):
        assert {path.name for path in Path(folder, "logs").iterdir()} == {"rank-00000.log", "rank-00001.log"}
        assert "step " in Path(folder, "logs/rank-00000.log").read_text()


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs; it is killed if it still does in the end."""
    with subprocess.Popen([*command, *FOREVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


TRAIN = ("phalanx", "train", "run.toml", "--run-dir", "run")


def trains() -> bool:
    return Path("run/metrics.jsonl").exists() and len(losses("run")) > 2


def until(condition: Callable[[], object], limit_s: float = 80.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_rank_that_is_killed_in_a_step_is_named():
    with started(*TRAIN) as process:
        until(trains)
        (agent,) = children(process.pid)
        os.kill(children(agent)[1], signal.SIGKILL)
        _, report = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "rank 1 (pipeline 0 data 0 tensor 1) on " in report
    assert "killed by signal 9" in report
    assert "of group tensor" in report, "the last record of each rank"
    assert Path("run/failure.txt").exists()


def test_torchrun_that_is_killed_takes_its_ranks_along():
    with started("torchrun", "--nproc-per-node=2", "--no-python", *TRAIN) as process:
        until(trains)
        ranks = children(process.pid)
    assert len(ranks) == 2
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 10.0)


def is_agent(pid: int) -> bool:
    return b"phalanx.trainer.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_who_stops_a_run_before_its_first_step_hears_that_nothing_is_saved():
    with started(*TRAIN) as process:
        until(lambda: any(is_agent(child) for child in children(process.pid)))  # which is loading torch now
        process.send_signal(signal.SIGTERM)
        _, report = process.communicate(timeout=60)
    assert process.returncode == 143
    assert report.endswith("phalanx: ended by SIGTERM; nothing is saved yet in run\n")


@pytest.mark.parametrize(("number", "to_a_rank", "code"), [("SIGTERM", False, 143), ("SIGUSR1", True, 75)])
def test_asked_to_stop_a_run_saves_and_goes_on_later(number: str, to_a_rank: bool, code: int):
    """Whoever gets the signal, all ranks stop after the same step, and the next start does what was left to do."""
    with started(*TRAIN) as process:
        until(trains)
        (agent,) = children(process.pid)
        os.kill(children(agent)[1] if to_a_rank else process.pid, signal.Signals[number])
        output, report = process.communicate(timeout=60)
    assert process.returncode == code, report
    assert "with everything saved; the same command with --run-dir run goes on" in output
    assert to_a_rank or report.endswith("phalanx: ended by SIGTERM\n")
    steps = len(losses("run"))
    assert Path(f"run/checkpoints/step-{steps:06d}").is_dir()
    again = command("phalanx", "train", "run.toml", "--run-dir", "run", f"--set=job.num_steps={steps + 2}")
    assert again.returncode == 0, again.stderr
    assert len(losses("run")) == steps + 2


ENDS = """
from pathlib import Path
from phalanx.errors import RunError, Stopped
from phalanx.launch import fold
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer.worker import work

def end(plan, run_dir):
    raise {error}

plan, run_dir = Plan.read(Path("plan.json")), RunDir(Path("run"))
run_dir.create()
work(plan, run_dir, {rank}, end, lambda: fold.report(plan.layout, run_dir, {rank}))
"""


def test_rank_of_torchrun_that_stopped_as_asked_complains_of_nothing():
    """Rank 0 has said it to all; a second time on standard error would look like a failure."""
    assert command("phalanx", "plan", "run.toml", "-o", "plan.json").returncode == 0
    ended = command(sys.executable, "-c", ENDS.format(rank=0, error='Stopped("enough")'))
    assert (ended.returncode, ended.stdout, ended.stderr) == (75, "", "")


def test_rank_of_torchrun_says_what_happened_though_its_run_folder_cannot_be_written_to():
    assert command("phalanx", "plan", "run.toml", "-o", "plan.json").returncode == 0
    for rank in range(2):
        Path(f"run/outcomes/rank-{rank:05d}.json").mkdir(parents=True)
        ended = command(sys.executable, "-c", ENDS.format(rank=rank, error='RunError("the real cause")'))
        assert ended.returncode == 3
        assert f"phalanx: rank {rank}: the real cause\nrun cannot be written to: " in ended.stderr, ended.stderr
