"""`phalanx train`, killed with all its processes, comes to the very end of a run left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import write_run_file

from phalanx.checkpoint.folder import checkpoints
from phalanx.errors import InputError
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir
from phalanx.watch import metrics

PHALANX = str(Path(sys.executable).with_name("phalanx"))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    often = "[checkpoint]\nevery_steps = 2\nkeep = 2\n"
    write_run_file(tmp_path, Layout(data=2, micro_batch=2, zero=1), num_steps=24, more=often)


def train(folder: str) -> subprocess.Popen:
    """Start it in a process group of its own."""
    command = [PHALANX, "train", "run.toml", "--run-dir", folder]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(folder: str) -> str:
    said, _ = (process := train(folder)).communicate(timeout=100)
    assert process.returncode == 0, said
    return said


def kill_after_a_save(folder: str, delay_s: float) -> None:
    """Let the run save once more, wait a little, then kill all its processes at once."""
    seen = {path for _, path in checkpoints(RunDir(Path(folder)).checkpoints)}
    with train(folder) as process:
        while not {path for _, path in checkpoints(RunDir(Path(folder)).checkpoints)} - seen:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGKILL)
    while is_locked(folder):  # the ranks die with their agent, and let go of the folder
        time.sleep(0.01)


def is_locked(folder: str) -> bool:
    try:
        with RunDir(Path(folder)).lock():
            return False
    except InputError:
        return True


def test_a_kill_changes_nothing():
    finish("straight")
    kill_after_a_save("killed", random.Random(7).uniform(0.0, 0.2))
    said = finish("killed")
    assert "going on from step " in said
    ends = [RunDir(Path(folder)).checkpoint(24) for folder in ("straight", "killed")]
    files = sorted(path.name for path in ends[0].glob("*.safetensors"))
    assert len(files) == 6
    assert all((ends[0] / name).read_bytes() == (ends[1] / name).read_bytes() for name in files)
    records = [metrics.read(RunDir(Path(folder)).metrics) for folder in ("straight", "killed")]
    assert len(records[0]) == 24
    for straight, killed in zip(*records, strict=True):
        assert (straight.loss, straight.gradient_norm, straight.learning_rate) == (
            killed.loss,
            killed.gradient_norm,
            killed.learning_rate,
        )
