"""Numbers nobody can mean, files that never end, outputs that take nothing: answered at once, in words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main

RUN = """[model]
name = "gpt2"
[job]
global_batch = 64
seq_len = 512
num_steps = 3
[data]
text = "python-stdlib"
"""
HUGE = 2**63 - 1


@pytest.fixture(autouse=True)
def _run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)


@pytest.mark.timeout(60)  # where these are not refused, they take hours
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"plan run.toml --set cluster.devices_per_node={HUGE}", ["cluster.devices_per_node", "at most 65,536"]),
        (f"plan run.toml --set cluster.num_nodes={HUGE}", ["cluster.num_nodes", "at most 1,048,576"]),
        (f"plan run.toml --set model.vocab={HUGE}", ["model.vocab", "at most 2,147,483,647"]),
        (f"plan run.toml --set model.ffn={HUGE}", ["model.ffn", "at most 16,777,216"]),
        (f"plan run.toml --set job.seq_len={HUGE}", ["job.seq_len", "at most 2,147,483,647"]),
        (f"plan run.toml --set job.global_batch={HUGE}", ["job.global_batch", "at most 1,048,576"]),
        (f"plan run.toml --set layout.micro_batch={HUGE}", ["layout.micro_batch", "at most 1,048,576"]),
        (f"plan run.toml --set layout.recompute_every={HUGE}", ["layout.recompute_every", "at most 100,000"]),
        ("train run.toml --set layout.data=1000000007", ["layout.data=1000000007: 1,000,000,007 processes"]),
        (f"plan run.toml --set layout.tensor={HUGE} --set layout.data=2", [f"layout.tensor={HUGE}: ", "processes"]),
        ("schedule show --pipeline 4 --micro-batches 100000000", ["100,000,000 micro-batches on 4 stages", "50,000"]),
        ("schedule show --pipeline 4000000000 --micro-batches 1", ["4,000,000,000 stages are too many"]),
    ],
)
def test_numbers_nobody_can_mean_are_refused(arguments: str, words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments.split()) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert "device.memory_bytes" not in said  # a figure that follows from what the user wrote is not the user's mistake


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ["plan", "train", "verify"])
@pytest.mark.parametrize("name", ["pipe.toml", "pipe.json", "/dev/zero"])
def test_files_that_never_end_are_refused(command: str, name: str, capsys: pytest.CaptureFixture[str]):
    if name.startswith("pipe"):
        os.mkfifo(name)
    assert main([command, name]) == 2
    assert f"{name}: is no plain file" in capsys.readouterr().err


def test_an_empty_path_is_not_the_current_folder(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "run.toml", "--run-dir", ""]) == 2
    assert "--run-dir: is empty, not a path" in capsys.readouterr().err
    assert main(["plan", ""]) == 2
    assert "RUN: is empty, not a path" in capsys.readouterr().err
    assert os.listdir() == ["run.toml"]


@pytest.mark.parametrize("arguments", [["plan", "run.toml"], ["schedule", "show", "--pipeline=2", "--micro-batches=2"]])
def test_an_output_that_takes_nothing_is_said(arguments: list[str]):
    program = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-c", program, *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 3
    assert result.stderr == "phalanx: the output cannot be written: No space left on device\n"


def test_an_unknown_engine_is_told_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "run.toml", "--engine", "torchtitn"]) == 2
    assert 'unknown engine "torchtitn"\n    → did you mean torchtitan? known: ' in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "plan LONG.toml",
        "train LONG.json",
        "plan run.toml -o LONG.json",
        "plan run.toml --set cluster.file=LONG",
        "plan model.toml --set model.hf=LONG",
        "train run.toml --set data.text=LONG",
        "train data.toml --set data.path=LONG",
        "train data.toml --set data.validation_path=LONG --set data.path=LONG",
        "train run.toml --resume LONG",
        "train run.toml --set checkpoint.init_from=LONG",
        "train run.toml --run-dir LONG",
        "run --ranks 2 LONG",
        "checkpoint list LONG",
        "data inspect LONG",
        "data build --tokenizer LONG run.toml",
        "data build --vocab 300 LONG",
        "data build --vocab 300 run.toml -o LONG",
    ],
)
def test_names_longer_than_names_can_be_are_wrong_input(arguments: str, capsys: pytest.CaptureFixture[str]):
    Path("model.toml").write_text(RUN.replace('name = "gpt2"', ""))
    Path("data.toml").write_text(RUN.replace('text = "python-stdlib"', ""))
    assert main(arguments.replace("LONG", "a" * 300).split()) == 2
    said = capsys.readouterr().err
    assert "an error of ours" not in said
    assert "File name too long" in said or "no input" in said
