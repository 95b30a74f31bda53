"""`phalanx checkpoint`: lists, verifies, names damage, and needs no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from tiny import tiny_plan

from phalanx.checkpoint import survey
from phalanx.checkpoint.manifest import MANIFEST, PLAN, Manifest, StoredFile
from phalanx.cli.main import main
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    """A run with two checkpoints that hold a plan and one file."""
    run_dir = RunDir(tmp_path / "run")
    for step in (10, 20):
        path = run_dir.checkpoint(step)
        path.mkdir(parents=True)
        tiny_plan(Layout(tensor=2)).write(path / PLAN)
        (path / "state").write_bytes(bytes(3000))
        files = {}
        for name in (PLAN, "state"):
            data = (path / name).read_bytes()
            files[name] = StoredFile(num_bytes=len(data), head_bytes=len(data), head_crc32=zlib.crc32(data))
        manifest = Manifest(step=step, written_at="2026-01-02T03:04:05+00:00", extra={}, files=files, tensors=())
        manifest.write(path / MANIFEST)
    return run_dir


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("which", ["run", "checkpoints", "one"])
def test_list_tells_each_checkpoint(run_dir, capsys, which):
    path = {"run": run_dir.path, "checkpoints": run_dir.checkpoints, "one": run_dir.checkpoint(10)}[which]
    assert main(["checkpoint", "list", str(path)]) == 0
    said = capsys.readouterr().out
    assert ("20" in said.split()) == (which != "one")
    for words in ("10", "2026-01-02 03:04:05", "tensor 2", "all files there"):
        assert words in said


def test_verify_finds_what_list_cannot_see(run_dir, capsys):
    assert main(["checkpoint", "verify", str(run_dir.path)]) == 0
    assert capsys.readouterr().out.count("all checksums match") == 2
    flip(run_dir.checkpoint(20) / "state")
    assert main(["checkpoint", "list", str(run_dir.path)]) == 0
    assert "damaged" not in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run_dir.path)]) == 1
    said = capsys.readouterr().out
    assert "damaged" in said and "step-000020/state: bytes 0 to 3,000" in said


def test_what_a_run_deletes_meanwhile_is_not_damaged(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(survey, "check_contents", lambda path, *_: shutil.rmtree(path) or [f"{path}: gone"])
    assert main(["checkpoint", "verify", str(run_dir.checkpoints)]) == 0
    assert "gone" not in capsys.readouterr().out


def test_list_shows_what_is_cut_or_unfinished(run_dir, capsys):
    (run_dir.checkpoint(20) / "state").write_bytes(b"")
    (run_dir.checkpoint(10) / MANIFEST).unlink()
    assert main(["checkpoint", "list", str(run_dir.path)]) == 0
    said = capsys.readouterr().out
    assert "has 0 bytes of 3,000" in said and "never finished" in said


def test_json_has_it_all(run_dir, capsys):
    (run_dir.checkpoint(20) / "state").unlink()
    assert main(["checkpoint", "list", str(run_dir.path), "--json"]) == 0
    newest, oldest = json.loads(capsys.readouterr().out)
    assert (newest["step"], oldest["step"]) == (20, 10)
    assert newest["problems"] and not oldest["problems"]
    assert oldest["num_bytes"] > 3000 and oldest["layout"].startswith("tensor 2")


@pytest.mark.parametrize(("name", "said"), [("nowhere", "there is no /"), (".", "there is no checkpoint in")])
def test_no_checkpoint_is_wrong_input(tmp_path, capsys, name, said):
    assert main(["checkpoint", "list", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_neither_loads_torch(run_dir):
    program = (
        "import sys; from phalanx.cli.main import main; "
        f"assert main(['checkpoint', 'verify', {str(run_dir.path)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
