"""`phalanx plan --emit`: settings alone on standard output, and refusals with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.plan.plan import Plan
from phalanx.planner.emit import emit

RUN = """
[model]
name = "llama-3.1-8b"
[cluster]
name = "dgx-h100"
[job]
global_batch = 64
seq_len = 4096
num_steps = 100
[layout]
data = 8
zero = 1
recompute = "full"
recompute_every = 1
"""


def test_the_command_prints_settings_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = tmp_path / "run.toml", tmp_path / "plan.json"
    run.write_text(RUN)
    given = ["plan", str(run), "--engine", "megatron-core-2024", "--emit", "megatron-lm", "-o", str(output)]
    assert main(given) == 0
    shown = capsys.readouterr()
    assert shown.out.rstrip("\n") == emit(Plan.read(output), "megatron-lm", "megatron-core-2024").text
    assert all(line.startswith("--") for line in shown.out.splitlines()) and "docs/migrate.md" in shown.err


def test_the_command_refuses_with_the_line_of_the_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    assert main(["plan", str(run), "--emit", "accelerate"]) == 2
    assert f"{run}:12: Accelerate has no counterpart of zero = 1" in capsys.readouterr().err
    for other in ("--json", "--explain"):
        assert main(["plan", str(run), "--emit", "accelerate", other]) == 2
    assert main(["plan", str(run), "--emit", "megatron"]) == 2
    assert "did you mean megatron-lm?" in capsys.readouterr().err
