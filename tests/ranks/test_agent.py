"""Runs of toy entries through launch.local.start and the agent: how they end, what they leave, who outlives whom."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import run_ranks
from tiny import tiny_plan

from phalanx.errors import InputError
from phalanx.launch.local import Result, start
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.spec.job import CheckpointSpec
from phalanx.trainer.agent import STOP_SIGNALS, Agent
from phalanx.watch.events import RingWriter, ring_directory, ring_path

TESTS = Path(__file__).resolve().parent.parent
GONE_S = 10.0


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("MASTER_PORT", raising=False)


def prepared(folder: Path, layout: Layout | None = None) -> RunDir:
    run_dir = RunDir(folder / "run")
    run_dir.create()
    tiny_plan(layout or Layout(data=3)).write(run_dir.plan)
    return run_dir


def run(folder: Path, entry: str, layout: Layout | None = None) -> tuple[Result, RunDir]:
    run_dir = prepared(folder, layout)
    return start(run_dir.plan, run_dir, f"toys:{entry}"), run_dir


def living(run_dir: RunDir) -> list[int]:
    """Processes whose command line names the run folder: the launcher, the agent, and its forks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(run_dir.path) in (process / "cmdline").read_text().split("\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


PROGRAM = """
import sys
from pathlib import Path
from phalanx.launch.local import start
from phalanx.rundir import RunDir
from phalanx.trainer.agent import STOP_SIGNALS, Agent

run_dir = RunDir(Path(sys.argv[1]))
result = start(run_dir.plan, run_dir, sys.argv[2])
print(result.failure or "")
sys.exit(result.exit_code)
"""

Launch = Callable[[RunDir, str], subprocess.Popen]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """`start` in a process of its own, which can be killed; none is left when the test ends."""
    with contextlib.ExitStack() as stack:

        def launched(run_dir: RunDir, entry: str) -> subprocess.Popen:
            command = [sys.executable, "-c", PROGRAM, str(run_dir.path), f"toys:{entry}"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield launched


def ranks_up(run_dir: RunDir, num_ranks: int) -> list[int]:
    """Wait until all ranks of a sleeping entry are there; their processes and their children's."""
    files = [run_dir.path / f"alive-{rank}" for rank in range(num_ranks)]
    until(lambda: all(file.exists() and file.read_text() for file in files), "ranks did not start")
    return [int(pid) for file in files for pid in file.read_text().split()]


def test_all_ranks_finish_and_only_rank_0_is_heard(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    result, run_dir = run(tmp_path, "speak")
    assert result == Result(exit_code=0)
    console = capfd.readouterr().out
    for rank in range(3):
        log = run_dir.log(rank).read_text()
        for line in ("output of rank", "error of rank", "native output of rank"):
            assert f"{line} {rank}\n" in log
            assert (f"{line} {rank}\n" in console) == (rank == 0)
    assert console.count("UserWarning: the moon is full") == 2, "once at once, once with the count"
    assert "2 times on ranks 1, 2: " in console
    assert sorted(path.name for path in run_dir.logs.iterdir()) == [f"rank-0000{rank}.log" for rank in range(3)]


def test_ranks_meet_in_the_store_with_one_thread_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    result, _ = run(tmp_path, "meet", Layout(data=4, tensor=2))
    assert result.exit_code == 0
    assert "8 ranks met, 1 thread\n" in capfd.readouterr().out


def test_killed_rank_is_the_cause_although_another_complained_first(tmp_path: Path):
    result, run_dir = run(tmp_path, "kill", Layout(pipeline=3))
    failure = result.failure
    assert result.exit_code == 3
    assert failure is not None
    (cause,) = failure.causes
    assert (cause.ranks, cause.coord) == ((1,), "pipeline 1 data 0 tensor 0")
    assert "killed by signal 9 (SIGKILL), often the kernel's out-of-memory killer" in cause.what
    assert cause.peak_memory_bytes > 2**20
    assert cause.last_lines == ("about to do something large",)
    (consequence,) = failure.consequences
    assert consequence.ranks == (2,)
    assert run_dir.failure_text.read_text() == f"{failure}\n"
    assert json.loads(run_dir.failure_json.read_text())["causes"][0]["ranks"] == [1]
    assert living(run_dir) == []


def test_exception_is_reported_with_place_log_and_last_records(tmp_path: Path):
    result, run_dir = run(tmp_path, "fail")
    assert result.exit_code == 3
    text = str(result.failure)
    assert text.splitlines()[1].startswith("rank 2 (pipeline 0 data 2 tensor 0) on ")
    assert "raised ValueError: x is 3" in text
    assert f"{TESTS / 'toys.py'}:" in text
    assert "in fail" in text
    assert "all_reduce 'gradients' #5 of group data with ranks 0, 1, 2, sum of float32" in text
    assert "step 7" in text
    assert f"{TESTS / 'toys.py'}, line" in text, "the Python line of ranks that still lived"
    assert 'raise ValueError("x is 3")' in run_dir.log(2).read_text()
    assert str(run_dir.log(2)) in text.splitlines()[-1]
    assert not ring_path(run_dir.path, 0).exists()
    assert run_dir.ring(0).exists()


def test_wrong_input_on_all_ranks_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    result, _ = run(tmp_path, "fail_alike")
    assert result.exit_code == 2
    assert str(result.failure) == "the data is too short\n    → more of it"
    assert "Traceback" not in capfd.readouterr().out


def test_leaving_early_with_exit_code_0_is_a_failure(tmp_path: Path):
    result, run_dir = run(tmp_path, "leave")
    assert result.exit_code == 3
    assert "rank 1 (pipeline 0 data 1 tensor 0)" in str(result.failure)
    assert "left early with exit code 0" in str(result.failure)
    assert living(run_dir) == []


def test_crash_in_native_code_names_the_signal_and_the_python_line(tmp_path: Path):
    result, _ = run(tmp_path, "crash")
    assert "signal 11 (SIGSEGV), an invalid memory access" in str(result.failure)
    assert "toys.py" in str(result.failure)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_request_to_end_reaches_all_ranks(tmp_path: Path, launch: Launch, number: signal.Signals, exit_code: int):
    run_dir = prepared(tmp_path)
    process = launch(run_dir, "obey")
    ranks_up(run_dir, 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == exit_code, output
    assert "Traceback" not in output
    assert living(run_dir) == []
    assert not run_dir.failure_text.exists()


def stopped_early(rank: int, run_dir: RunDir) -> tuple[int, bool]:
    agent = Agent(plan_path=run_dir.plan, plan=Plan.read(run_dir.plan), run_dir=run_dir, entry="toys:speak")
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.kill(os.getpid(), signal.SIGTERM)
    with socket.socket() as listener:
        return agent.run(listener), bool(agent.live)


def test_asked_to_stop_before_any_rank_started_it_starts_none(tmp_path: Path):
    """In a process of its own: the signal would strike any other thread of this one."""
    run_dir = prepared(tmp_path)
    assert run_ranks(1, stopped_early, run_dir) == [(128 + signal.SIGTERM, False)]
    assert not any(run_dir.outcomes.iterdir())


def test_second_interrupt_kills_ranks_that_do_not_listen(tmp_path: Path, launch: Launch):
    run_dir = prepared(tmp_path)
    process = launch(run_dir, "sleep")
    pids = ranks_up(run_dir, 3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "the ranks ignore the first request"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(map(alive, pids))


def test_ranks_that_take_longer_than_the_grace_time_are_killed(tmp_path: Path, launch: Launch):
    run_dir = prepared(tmp_path)
    tiny_plan(Layout(data=3), checkpoint=CheckpointSpec(grace_s=1.0)).write(run_dir.plan)
    process = launch(run_dir, "sleep")
    pids = ranks_up(run_dir, 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not any(map(alive, pids))


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_nothing_outlives_a_killed_parent(tmp_path: Path, launch: Launch, victim: str):
    run_dir = prepared(tmp_path)
    process = launch(run_dir, "obey")
    ranks = ranks_up(run_dir, 3)
    (agent,) = [pid for pid in living(run_dir) if pid not in (process.pid, *ranks)]
    os.kill(process.pid if victim == "launcher" else agent, signal.SIGKILL)
    until(lambda: not any(map(alive, [agent, *ranks])), "processes outlive their parent", GONE_S)
    output, _ = process.communicate(timeout=60)
    if victim == "agent":
        assert process.returncode == 3
        assert "the agent that watches the ranks was killed by signal 9" in output


def test_two_runs_at_once_do_not_meet(tmp_path: Path, launch: Launch):
    folders = [tmp_path / "one", tmp_path / "two"]
    runs = [launch(prepared(folder), "meet") for folder in folders]
    for process in runs:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        assert "3 ranks met" in output


def test_rings_of_dead_runs_are_cleared_at_start(tmp_path: Path):
    """A ring whose writer and its parent are gone is removed by whoever starts next."""
    stale = ring_directory() / f"phalanx-{os.getuid()}-{os.getpid():016x}-00000.ring"
    middle = (
        "import os, sys; from pathlib import Path; from phalanx.watch.events import RingWriter\n"
        "if os.fork() == 0: RingWriter(Path(sys.argv[1]), rank=0); os._exit(0)\n"
        "os.wait()"
    )
    subprocess.run([sys.executable, "-c", middle, str(stale)], check=True)
    mine = ring_directory() / f"phalanx-{os.getuid()}-{os.getpid():016x}-00001.ring"
    ring = RingWriter(mine, rank=1)
    assert stale.exists()
    run(tmp_path, "speak")
    assert not stale.exists()
    assert mine.exists(), "its writer lives"
    ring.close()


def test_port_that_is_taken_is_refused_before_any_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(InputError, match=rf"port {port} is in use by process {os.getpid()}"):
            run(tmp_path, "speak")


def test_entry_that_does_not_exist_is_wrong_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    result, _ = run(tmp_path, "nothing")
    assert result == Result(exit_code=2)
    assert "toys:nothing cannot be loaded" in capfd.readouterr().err
