"""metrics.jsonl: whole lines, the later of a repeated step, and a full disk that ends nothing."""

from __future__ import annotations

import json
import math
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import InputError
from phalanx.watch.metrics import AXES, MetricsWriter, StepRecord, read


def record(step: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        gradient_norm=0.5,
        learning_rate=1e-3,
        step_s=0.1,
        tokens_per_s=10.0,
        tokens_per_s_per_device=5.0,
        share={"compute": 1.0},
    )


def test_seconds_of_all_ranks_become_shares_of_the_average_one():
    facts = {"step": 1, "loss": 1.0, "gradient_norm": 0.5, "learning_rate": 1e-3}
    blocked = [0.4] + [0.0] * (len(AXES) - 1)
    made = StepRecord.measured([4.0, *blocked], num_ranks=2, tokens_per_step=100, **facts)
    assert (made.step_s, made.tokens_per_s, made.tokens_per_s_per_device) == (2.0, 50.0, 25.0)
    assert made.share == pytest.approx({"compute": 0.9, AXES[0]: 0.1} | dict.fromkeys(AXES[1:], 0.0))


def test_a_line_names_the_axes_that_took_time():
    shown = replace(record(7), share={"compute": 0.75, "tensor": 0.0, "data": 0.25}).line(100)
    assert shown.startswith("step   7/100  loss  1.0000")
    assert "compute 75%  data 25%" in shown


def test_a_resumed_run_overrides_the_steps_it_repeats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, pytest.fail)
    for step, loss in [(1, 3.0), (2, 2.0), (3, 1.0), (2, 2.5)]:
        writer.write(record(step, loss))
    assert [(entry.step, entry.loss) for entry in read(path)] == [(1, 3.0), (2, 2.5), (3, 1.0)]


def test_a_full_disk_is_said_once_and_leaves_whole_lines(tmp_path):
    """A limit on the size of files, as a full disk does, cuts a line in its midst."""
    path = tmp_path / "metrics.jsonl"
    said: list[str] = []
    writer = MetricsWriter(path, said.append)
    writer.write(record(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
        writer.write(record(2))
        writer.write(record(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    writer.write(record(4))
    assert len(said) == 1 and "from step 2 on" in said[0] and str(path) in said[0]
    assert [entry.step for entry in read(path)] == [1, 4]


def test_damage_is_an_error_that_names_the_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1')
    with pytest.raises(InputError, match="metrics"):
        read(path)


def test_a_step_after_which_was_validated_says_so(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, pytest.fail)
    validated = replace(record(1), validation_loss=5.25, validation_s=1.5)
    for entry in (validated, record(2), replace(record(3), validation_loss=math.nan, validation_s=0.5)):
        writer.write(entry)
    assert read(path)[:2] == [validated, record(2)]
    assert math.isnan(read(path)[2].validation_loss)
    assert "validation_loss" not in json.loads(path.read_text().splitlines()[1])
    assert "validation 5.2500 in 1.5 s" in validated.line(3)
    assert "validation" not in record(2).line(3)


def test_what_is_no_number_is_null_and_comes_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, pytest.fail)
    writer.write(replace(record(1), loss=math.nan, gradient_norm=math.inf, skipped_steps=3))
    writer.write(record(2))
    assert json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)["loss"] is None
    skipped, normal = read(path)
    assert math.isnan(skipped.loss)
    assert (skipped.is_finite, normal.is_finite) == (False, True)
    assert "skipped (3 so far)" in skipped.line(2)
    assert "no supervised token" in replace(normal, updated=False).line(2)
    assert "no supervised token" not in normal.line(2)
    assert "skipped" not in normal.line(2)
