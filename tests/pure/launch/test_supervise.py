"""From the files of a failed run to its cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import CheckFailed, CommError, DataError
from phalanx.launch import supervise
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir
from phalanx.watch.outcomes import Ending, Outcome, RaisedError, read_endings, write_endings

LAYOUT = Layout(pipeline=2, tensor=2)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    return run_dir


def ending(rank: int, *, exit_code: int | None = None, signal: int | None = None, **changes: object) -> Ending:
    values = {"host": "h", "by_agent": False, "time_s": 100.0 + rank, "peak_memory_bytes": 3 << 30}
    return Ending(rank=rank, exit_code=exit_code, signal=signal, **(values | changes))  # type: ignore[arg-type]


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


def outcome(run_dir: RunDir, rank: int, error: BaseException | None, time_s: float = 100.0) -> None:
    told = RaisedError.of(raised(error)) if error else None
    Outcome(rank=rank, host="h", time_s=time_s, error=told).write(run_dir.outcome(rank))


def collect(run_dir: RunDir, *endings: Ending) -> supervise.Failure:
    write_endings(run_dir.endings, endings)
    return supervise.collect(LAYOUT, run_dir, agent_exit_code=3)


def test_written_endings_and_outcomes_are_read_again(run_dir: RunDir):
    endings = (ending(0, exit_code=0), ending(1, signal=9, by_agent=True))
    write_endings(run_dir.endings, endings)
    assert read_endings(run_dir.endings) == endings
    told = Outcome.now(2, raised(ValueError("x")))
    told.write(run_dir.outcome(2))
    assert Outcome.read(run_dir.outcome(2)) == told
    assert Outcome.read(run_dir.outcome(3)) is None


def test_place_is_the_innermost_line_that_is_no_librarys():
    error = raised(ValueError())
    try:
        Path("/nowhere/at/all").read_text()
    except OSError as caught:
        error = caught
    told = RaisedError.of(error)
    assert (told.file, told.kind) == (__file__, "FileNotFoundError")
    assert told.traceback.startswith("Traceback")


@pytest.mark.parametrize(
    ("error", "blames_peer"),
    [
        (CommError("all_reduce timed out"), True),
        (ConnectionResetError("reset"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1042"), True),
        (RuntimeError("Timed out waiting 10000ms for recv operation to complete"), True),
        (RuntimeError("out of memory"), False),
        (ValueError("connection closed"), False),
    ],
)
def test_errors_about_peers(error: Exception, blames_peer: bool):
    assert RaisedError.of(raised(error)).blames_peer == blames_peer


def test_cause_is_the_earliest_that_blames_no_peer(run_dir: RunDir):
    """Ranks 1 and 2 complain before the agent has seen that rank 3 is gone."""
    outcome(run_dir, 1, CommError("rank 3 is gone"), time_s=99.0)
    outcome(run_dir, 2, CommError("rank 3 is gone"), time_s=98.0)
    failure = collect(
        run_dir,
        ending(2, exit_code=3),
        ending(1, exit_code=3),
        ending(3, signal=11),
        ending(0, signal=15, by_agent=True),
    )
    assert [cause.ranks for cause in failure.causes] == [(3,)]
    assert [other.ranks for other in failure.consequences] == [(2, 1)]
    assert failure.exit_code == 3
    text = str(failure)
    assert text.index("rank 3 (pipeline 1 data 0 tensor 1) on h was killed by signal 11") < text.index("consequence")
    assert "peak memory  3 GiB" in text


def test_without_a_better_explanation_a_peer_error_is_the_cause(run_dir: RunDir):
    outcome(run_dir, 1, CommError("all_reduce timed out: rank 2 did not come"))
    failure = collect(run_dir, ending(1, exit_code=3), ending(2, signal=9, by_agent=True))
    assert [cause.ranks for cause in failure.causes] == [(1,)]
    assert failure.consequences == ()


def test_exit_code_is_that_of_the_first_error(run_dir: RunDir):
    outcome(run_dir, 0, DataError("too short"), time_s=2)
    outcome(run_dir, 1, CheckFailed("loss differs"), time_s=1)
    failure = collect(run_dir, ending(0, exit_code=2), ending(1, exit_code=1))
    assert failure.exit_code == 1


def test_rank_that_finished_is_no_failure(run_dir: RunDir):
    outcome(run_dir, 0, None)
    failure = collect(run_dir, ending(0, exit_code=0), ending(1, exit_code=0))
    assert [cause.ranks for cause in failure.causes] == [(1,)]
    assert "left early with exit code 0" in failure.causes[0].what


def test_dead_agent_is_told_apart(run_dir: RunDir):
    failure = supervise.collect(LAYOUT, run_dir, agent_exit_code=-9)
    assert "the agent that watches the ranks was killed by signal 9 (SIGKILL)" in str(failure)
    assert failure.exit_code == 3


def test_log_and_damaged_ring_do_not_break_the_report(run_dir: RunDir):
    run_dir.log(0).write_bytes(b"\xff\xfe one\n" + b"line\n" * 50)
    run_dir.ring(0).write_text("not a ring")
    failure = collect(run_dir, ending(0, signal=7))
    assert failure.causes[0].last_lines[-1] == "line"
    assert len(failure.causes[0].last_lines) < 20
    assert "is not a ring file" in str(failure)


def test_same_error_with_other_numbers_is_folded(run_dir: RunDir):
    def check(size: int) -> None:
        raise ValueError(f"size {size}")

    for rank in range(4):
        error: BaseException = ValueError()
        try:
            check(rank)
        except ValueError as caught:
            error = caught
        Outcome(rank=rank, host="h", time_s=rank, error=RaisedError.of(error)).write(run_dir.outcome(rank))
    failure = collect(run_dir, *(ending(rank, exit_code=3) for rank in range(4)))
    (cause,) = failure.causes
    assert cause.ranks == (0, 1, 2, 3)
    assert "ranks 0, 1, 2, 3 on h raised ValueError: size 0" in str(failure)
