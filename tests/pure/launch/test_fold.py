"""Ranks that nobody watched tell together, in one report, who failed first and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import CommError, InputError
from phalanx.launch import fold
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir
from phalanx.watch.outcomes import Outcome

LAYOUT = Layout(data=2, tensor=2)
VICTIM = CommError("all_reduce 'gradients' of group data failed: a member has gone")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(fold, "GRACE_S", 0.1)
    run_dir = RunDir(tmp_path)
    run_dir.create()
    return run_dir


def end(run_dir: RunDir, errors: dict[int, BaseException | None]) -> None:
    """Ranks say, in this order, how they ended."""
    for rank, error in errors.items():
        try:
            if error:
                raise error
        except Exception as raised:  # noqa: BLE001
            Outcome.now(rank, raised).write(run_dir.outcome(rank))
        else:
            Outcome.now(rank, None).write(run_dir.outcome(rank))


def test_the_first_that_failed_is_named_by_the_lowest_rank(run_dir: RunDir) -> None:
    end(run_dir, {0: VICTIM, 2: ValueError("the real cause"), 1: VICTIM, 3: VICTIM})
    report = fold.report(LAYOUT, run_dir, 0)
    assert "Run failed\nrank 2 (pipeline 0 data 1 tensor 0) on " in report
    assert "raised ValueError: the real cause" in report
    assert "As a consequence\n  ranks 0, 1, 3 all_reduce 'gradients'" in report
    assert report.splitlines()[-2].startswith("First: rank 2 (pipeline 0 data 1 tensor 0) on ")
    assert "peak memory" not in report, "nobody measured it"
    assert run_dir.failure_text.read_text() == f"{report}\n"
    assert [fold.report(LAYOUT, run_dir, rank) for rank in (1, 2, 3)] == ["", "", ""]


def test_who_says_nothing_is_suspected_where_all_others_blame_their_peers(run_dir: RunDir) -> None:
    end(run_dir, {1: VICTIM, 0: VICTIM})
    report = fold.report(LAYOUT, run_dir, 0)
    assert "ranks 2, 3 on its host left no word: it was killed" in report
    assert "As a consequence\n  ranks 0, 1 all_reduce" in report


def test_who_says_nothing_may_still_run_where_there_is_a_cause(run_dir: RunDir) -> None:
    end(run_dir, {1: ValueError("the real cause")})
    report = fold.report(LAYOUT, run_dir, 1)
    assert "rank 1 (pipeline 0 data 0 tensor 1)" in report
    assert "left no word" not in report


def test_a_mistake_of_the_user_is_said_once_without_evidence(run_dir: RunDir) -> None:
    end(run_dir, dict.fromkeys(range(4), InputError("no such file", where="data.path")))
    assert fold.report(LAYOUT, run_dir, 0) == str(InputError("no such file", where="data.path"))


def test_ranks_that_finished_have_nothing_to_say(run_dir: RunDir) -> None:
    end(run_dir, {0: None, 1: None, 2: RuntimeError("disk full"), 3: None})
    assert "rank 2 (pipeline 0 data 1 tensor 0)" in fold.report(LAYOUT, run_dir, 2)


def test_one_that_could_not_leave_word_itself_reports_that_nobody_did(run_dir: RunDir) -> None:
    assert "ranks 0, 1, 2, 3 on its host left no word" in fold.report(LAYOUT, run_dir, 2)
