"""`phalanx demo`: a run, its first steps on one process, and whether they agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import tiny_plan

from phalanx.cli.main import main
from phalanx.plan.layout import Layout
from phalanx.spec.job import OptimizerSpec
from phalanx.studies.demo import Demonstration, _first_steps
from phalanx.watch.metrics import StepRecord

RUN = """\
[model]
name = "tiny"
vocab = 300
[job]
global_batch = 4
seq_len = 16
num_steps = 4
precision = "fp32"
[optimizer]
lr = 1e-2
warmup_steps = 1
[data]
text = "*.txt"
[layout]
tensor = 1
pipeline = 2
data = 1
micro_batch = 1
schedule = "1f1b"
"""


def test_a_run_is_trained_and_held_against_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    Path("words.txt").write_text("a few words, again and again and again\n" * 40)
    assert main(["demo", "run.toml"]) == 0
    output = capfd.readouterr().out
    assert "step 4/4" in output
    assert "step 3/3" in output  # on one process
    [checkpoint] = Path("runs").glob("tiny-*/checkpoints/step-000004")
    for word in ("loss on 2 processes", "tokens/s", str(checkpoint), "metrics.jsonl", "computes what one process"):
        assert word in output


def records(*losses: float) -> tuple[StepRecord, ...]:
    return tuple(
        StepRecord(
            step=step,
            loss=loss,
            gradient_norm=1.0,
            learning_rate=1.0,
            step_s=step,
            tokens_per_s=1.0,
            tokens_per_s_per_device=1.0,
            share={},
        )
        for step, loss in enumerate(losses, start=1)
    )


@pytest.mark.parametrize(
    ("losses", "ok"),
    [
        ((2.0, 1.9, 1.8), True),
        ((2.0 + 1e-5, 1.9 + 1e-4, 1.8 - 1e-4), True),
        ((2.0 + 1e-4, 1.9, 1.8), False),
        ((2.0, 1.9, 1.8 + 1e-3), False),
        ((float("nan"), 1.9, 1.8), False),
    ],
)
def test_losses_that_differ_are_not_ok(losses: tuple[float, ...], ok: bool) -> None:
    shown = Demonstration(
        plan=tiny_plan(Layout(), precision="fp32"),
        records=records(*losses, 1.7),
        alone=records(2.0, 1.9, 1.8),
        checkpoint=Path("c"),
        metrics=Path("m"),
    )
    assert shown.ok == ok
    assert shown.tokens_per_s == 8 * 32 / 3.0


@pytest.mark.parametrize(("warmup_steps", "num_steps", "expected"), [(0, 60, 2), (1, 60, 3), (10, 60, 3), (10, 1, 1)])
def test_only_steps_with_equal_learning_rates_are_compared(warmup_steps: int, num_steps: int, expected: int) -> None:
    plan = tiny_plan(Layout(data=2), num_steps=num_steps, optimizer=OptimizerSpec(warmup_steps=warmup_steps))
    first = _first_steps(plan)
    assert first.job == replace(plan.job, num_steps=expected)
    assert first.layout == Layout(micro_batch=plan.layout.micro_batch)
