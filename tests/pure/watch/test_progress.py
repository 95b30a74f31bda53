"""Which steps a run shows, what the lines of a throttled run stand for, and when it says how long it will take."""

from dataclasses import replace

import pytest

from phalanx.watch.metrics import StepRecord
from phalanx.watch.progress import Progress


def record(step: int, step_s: float = 1.0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=float(step),
        gradient_norm=0.5,
        learning_rate=1e-3,
        step_s=step_s,
        tokens_per_s=100.0 / step_s,
        tokens_per_s_per_device=50.0 / step_s,
        share={"compute": 1.0, "data": 0.0},
    )


def shown(progress: Progress, steps: range) -> list[int]:
    return [step for step in steps if progress.line(record(step)) is not None]


def test_the_first_ten_steps_every_so_many_and_the_last_are_shown():
    assert shown(Progress(47, 20), range(1, 48)) == [*range(1, 11), 20, 40, 47]
    assert shown(Progress(12, 1), range(1, 13)) == list(range(1, 13))
    assert shown(Progress(47, 20), range(23, 48)) == [*range(23, 33), 40, 47], "a run that goes on is soon seen to"


@pytest.mark.parametrize("event", [{"updated": False}, {"validation_loss": 2.0, "validation_s": 1.0}])
def test_a_step_with_something_to_tell_is_shown(event):
    progress = Progress(100, 50)
    shown(progress, range(1, 13))
    assert progress.line(replace(record(13), **event)) is not None
    assert progress.line(record(14)) is None


def test_time_speed_and_shares_are_means_since_the_last_line():
    progress = Progress(20, 20)
    shown(progress, range(1, 18))
    assert progress.line(replace(record(18, 1.0), share={"compute": 1.0, "data": 0.0})) is None
    assert progress.line(replace(record(19, 3.0), share={"compute": 0.5, "data": 0.5})) is None
    line = progress.line(record(20, 4.0))  # 11 to 17 took a second each
    assert line is not None
    assert "step 20/20  loss 20.0000" in line
    assert " 1.500 s" in line  # (7 + 1 + 3 + 4) / 10
    assert " 67 tokens/s" in line  # 10 steps of 100 tokens in 15 s
    assert "compute 90%  data 10%" in line  # 1.5 s of 15 s


def test_what_is_left_is_said_where_it_is_long_and_known():
    progress = Progress(100, 10)
    assert "left" not in (progress.line(record(1, 30.0)) or ""), "the first step warms up"
    assert (progress.line(record(2, 2.0)) or "").endswith("  3.27 min left")  # 98 × 2 s
    assert "left" not in (Progress(61, 10).line(record(2)) or "")
    late = Progress(100, 10)
    assert all("left" not in (late.line(record(step)) or "") for step in range(41, 101))


def test_a_run_that_has_ended_is_summed_up():
    progress = Progress(4, 1)
    assert progress.summary() == ""
    progress.line(record(3, 50.0))
    assert progress.summary() == "done: steps 3 to 3: loss 3.0000 → 3.0000"
    progress.line(replace(record(4, 2.0), validation_loss=2.5, validation_s=1.0))
    assert progress.summary() == "done: steps 3 to 4: loss 3.0000 → 4.0000, validation 2.5000, 50 tokens/s"
