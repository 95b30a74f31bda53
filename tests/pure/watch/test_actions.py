"""Measured times of a step's actions: few files, and a Walk of them."""

import os
import time

import pytest

from phalanx.errors import InputError
from phalanx.plan.layout import Layout
from phalanx.plan.schedule import schedule
from phalanx.rundir import RunDir
from phalanx.watch import actions
from phalanx.watch.actions import ActionsWriter, measured

LAYOUT = Layout(pipeline=2, data=2)
MADE = schedule("1f1b", 2, 1, 2)


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch):
    """As if no time passed between the files of two ranks."""
    monkeypatch.setattr(actions, "wall_clock_offset_s", lambda: 1e9)


def times(begin_s):
    return [(begin_s + index, begin_s + index + 0.5) for index in range(4)]


def left(run_dir, *, step=4, late_s=0.0):
    """What both coordinates leave, the second one later."""
    run_dir.create()
    for place, rank in enumerate((0, 2)):
        ActionsWriter(run_dir.actions(rank), 100, pytest.fail).after(step, times(5.0 + place * late_s))


def test_begins_with_the_first_action_of_all(tmp_path):
    left(RunDir(tmp_path), late_s=0.25)
    step, walk = measured(RunDir(tmp_path), LAYOUT, MADE)
    assert step == 4
    assert walk.starts_s == ((0, 1, 2, 3), (0.25, 1.25, 2.25, 3.25))
    assert walk.step_s == 3.75


def test_the_wall_clock_is_read_where_the_looks_are_closest(monkeypatch):
    monkeypatch.undo()
    ticks = iter([0.0, 9.0, *[10.0, 10.5] * 8])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(time, "time", lambda: 110.25)
    assert actions.wall_clock_offset_s() == 100.0


def test_few_steps_are_written(tmp_path):
    writer = ActionsWriter(tmp_path / "a.json", 100, pytest.fail)
    written = []
    for step in range(1, 101):
        writer.after(step, times(0.0))
        if (tmp_path / "a.json").exists():
            written.append(step)
            os.remove(tmp_path / "a.json")
    assert written == [1, 2, 4, 8, 16, 32, 64, 100]


def test_a_full_disk_is_told_once(tmp_path):
    said = []
    writer = ActionsWriter(tmp_path / "no" / "a.json", 8, said.append)
    for step in range(1, 9):
        writer.after(step, times(0.0))
    assert len(said) == 1
    assert "No such file or directory" in said[0]


def test_what_is_not_there_or_does_not_fit_is_refused(tmp_path):
    run_dir = RunDir(tmp_path)
    with pytest.raises(InputError, match="the folder of a run that has done a step"):
        measured(run_dir, LAYOUT, MADE)
    left(run_dir)
    with pytest.raises(InputError, match="times of 4 actions, 6 are in the plan"):
        measured(run_dir, LAYOUT, schedule("1f1b", 2, 1, 3))
    ActionsWriter(run_dir.actions(2), 100, pytest.fail).after(8, times(0.0))
    with pytest.raises(InputError, match="different steps: 4, 8"):
        measured(run_dir, LAYOUT, MADE)
