"""When the pipeline's actions of one step really ran: each pipeline coordinate leaves a small file, and together they
make a Walk, to be drawn as a predicted one is. Writer and reader stand here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.errors import InputError
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.schedule import Schedule
from phalanx.plan.walk import Walk
from phalanx.rundir import RunDir, write_whole


class ActionsWriter:
    """Writes the times of the latest step to be kept: the first, second, fourth, eighth … and the last of a run, so
    that a run of any length writes few. A full disk must not end a run: `say` hears of the first file left out."""

    def __init__(self, path: Path, num_steps: int, say: Callable[[str], None]) -> None:
        self._path, self._num_steps, self._say = path, num_steps, say

    def after(self, step: int, times_s: Sequence[tuple[float, float]]) -> None:
        """Step `step`, counting from 1, is done; `times_s` are begin and end of its actions on time.perf_counter."""
        if step & (step - 1) and step < self._num_steps:
            return
        offset = wall_clock_offset_s()
        starts, ends = ([moment + offset for moment in moments] for moments in zip(*times_s, strict=True))
        try:
            write_whole(self._path, json.dumps({"step": step, "starts_s": starts, "ends_s": ends}))
        except OSError as error:
            self._say(f"times of actions are not written: {self._path}: {error.strerror}")
            self._say = lambda line: None


def wall_clock_offset_s() -> float:
    """Seconds since the epoch minus time.perf_counter, which begins elsewhere on each host: read between two looks at
    the latter, those closest together of several."""
    looks = [(time.perf_counter(), time.time(), time.perf_counter()) for _ in range(9)]
    before_s, now_s, after_s = min(looks, key=lambda look: look[2] - look[0])
    return now_s - (before_s + after_s) / 2


def measured(run_dir: RunDir, layout: Layout, schedule: Schedule) -> tuple[int, Walk]:
    """The step that was kept last, and its Walk, beginning with the first action of all coordinates at 0 s.

    An action begins when what it needs has come, so that waiting shows as a gap. Raises InputError if files are
    missing, damaged or of different steps.
    """
    kept = [_read(run_dir.actions(layout.rank(Coord(pipeline=place)))) for place in range(layout.pipeline)]
    steps = {step for step, *_ in kept}
    if len(steps) > 1:
        what = f"pipeline ranks have left times of different steps: {', '.join(map(str, sorted(steps)))}"
        raise InputError(what, where=str(run_dir.path), instead="the run goes on: try again in a moment")
    for place, (_, starts, ends) in enumerate(kept):
        if not len(starts) == len(ends) == len(schedule.actions[place]):
            what = f"times of {len(starts)} actions, {len(schedule.actions[place])} are in the plan"
            raise InputError(what, where=str(run_dir.path), instead="a folder whose plan.json was not changed")
    first_s = min(starts[0] for _, starts, _ in kept)
    return steps.pop(), Walk(
        starts_s=tuple(tuple(moment - first_s for moment in starts) for _, starts, _ in kept),
        ends_s=tuple(tuple(moment - first_s for moment in ends) for *_, ends in kept),
    )


def _read(path: Path) -> tuple[int, list[float], list[float]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return int(values["step"]), list(values["starts_s"]), list(values["ends_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"no times of actions can be read from {path}: {error}"
        raise InputError(what, instead="the folder of a run that has done a step of training") from error
