"""The run folder: its names, its defaults, and that two runs never share one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import InputError
from phalanx.rundir import RunDir, write_whole


def test_default_folders_of_the_same_second_differ(tmp_path: Path):
    folders = [RunDir.default("tiny", tmp_path).path for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.is_dir() and folder.name.startswith("tiny-2") for folder in folders)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("qwen2.5-0.5b", "qwen2.5-0.5b"),
        ("meta-llama/Llama 3", "meta-llama-Llama-3"),
        ("../../etc", "etc"),
        ("a\nb [red]\0", "a-b-red"),
        ("/", "run"),
        ("", "run"),
    ],
)
def test_default_folder_is_one_folder_in_its_base_whatever_the_name(tmp_path: Path, name: str, folder: str):
    made = RunDir.default(name, tmp_path).path
    assert made.parent == tmp_path
    assert made.name.startswith(f"{folder}-2")


def test_names_of_files(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    assert run_dir.log(3) == tmp_path / "logs" / "rank-00003.log"
    assert run_dir.checkpoint(100) == tmp_path / "checkpoints" / "step-000100"
    assert not any(tmp_path.iterdir()), "naming a file makes none"


def test_folder_that_cannot_be_made_is_wrong_input(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for make in (RunDir(tmp_path / "file" / "run").create, lambda: RunDir.default("x", tmp_path / "file")):
        with pytest.raises(InputError, match="cannot write the run folder"):
            make()


def test_whether_a_folder_can_be_made_is_known_without_making_it(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("a" * 300), Path("/proc/self/run")):
        with pytest.raises(InputError, match="cannot write the run folder"):
            RunDir(path).check()
    for path in (tmp_path, tmp_path / "new" / "run"):
        RunDir(path).check()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_forget_keeps_logs_and_checkpoints(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    run_dir.create()
    told = [run_dir.outcome(0), run_dir.endings, run_dir.failure_text, run_dir.failure_json, run_dir.ring(1)]
    kept = [run_dir.log(0), run_dir.metrics, run_dir.checkpoint(1)]
    for path in (*told, *kept):
        path.write_text("x")
    run_dir.forget_last_attempt()
    assert not any(path.exists() for path in told)
    assert all(path.exists() for path in kept)


def test_locked_folder_names_its_holder(tmp_path: Path):
    with RunDir(tmp_path).lock(), pytest.raises(InputError, match=f"in use by host .*, process {os.getpid()}"):
        RunDir(tmp_path).lock().__enter__()
    with RunDir(tmp_path).lock():
        pass  # free again


def test_lock_lives_as_long_as_any_heir(tmp_path: Path):
    """The launcher may be killed while its ranks are still ending: nobody else may write the folder until then."""
    with RunDir(tmp_path).lock():
        heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    with pytest.raises(InputError, match="in use"):
        RunDir(tmp_path).lock().__enter__()
    heir.communicate(b"\n")
    with RunDir(tmp_path).lock():
        pass


def test_write_whole_replaces_and_leaves_nothing_beside(tmp_path: Path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    with pytest.raises(OSError, match="x"):
        write_whole(tmp_path / "x", "one")
    (tmp_path / "x" / "y").rmdir()
    (tmp_path / "x").rmdir()
    write_whole(tmp_path / "x", "one")
    write_whole(tmp_path / "x", "two")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["two"]
