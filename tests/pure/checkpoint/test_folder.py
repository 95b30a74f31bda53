"""Which checkpoints there are, which is the newest whole one, and what may be deleted: on small made-up folders."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from phalanx.checkpoint import folder as folders
from phalanx.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from phalanx.errors import CheckpointError, DamagedCheckpointError


def make(folder: Path, step: int) -> Path:
    """A checkpoint of one file without tensors."""
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    data = f"state of step {step}".encode()
    (path / "state").write_bytes(data)
    file = StoredFile(num_bytes=len(data), head_bytes=len(data), head_crc32=zlib.crc32(data))
    Manifest(step=step, written_at="", extra={}, files={"state": file}, tensors=()).write(path / MANIFEST)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_no_checkpoint_is_nothing_to_complain_of(tmp_path):
    assert folders.find(tmp_path) is None
    assert folders.find(tmp_path / "nowhere") is None


def test_the_newest_by_number_is_found(tmp_path):
    for step in (5, 10, 900):
        make(tmp_path, step)
    (tmp_path / "step-001000.tmp-1").mkdir()
    (tmp_path / "step-002000.aside-1").mkdir()
    found = folders.find(tmp_path)
    assert (found.step, found.path, found.passed_over) == (900, tmp_path / "step-000900", ())


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: (path / "state").unlink(), "No such file"),
        (lambda path: (path / "state").write_bytes(b""), "has 0 bytes of 16"),
        (lambda path: (path / MANIFEST).unlink(), "never finished"),
        (lambda path: (path / MANIFEST).write_text("{}"), "is damaged"),
        (lambda path: (path / MANIFEST).write_text(""), "is damaged"),
    ],
    ids=["missing file", "empty file", "no manifest", "other JSON", "empty manifest"],
)
def test_a_damaged_one_is_passed_over_with_its_reason(tmp_path, harm, said):
    make(tmp_path, 10)
    harm(make(tmp_path, 20))
    found = folders.find(tmp_path)
    assert found.step == 10
    assert len(found.passed_over) == 1 and said in found.passed_over[0] and "step-000020" in found.passed_over[0]


def test_only_damaged_ones_are_an_error_that_names_them_all(tmp_path):
    for step in (1, 2):
        (make(tmp_path, step) / "state").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint is whole.*step-000002.*step-000001"):
        folders.find(tmp_path)


def test_all_wrong_files_are_named_at_once(tmp_path):
    path = make(tmp_path, 1)
    manifest = Manifest.read(path / MANIFEST)
    more = StoredFile(num_bytes=3, head_bytes=0, head_crc32=0)
    files = {**manifest.files, "lost": more}
    Manifest(step=1, written_at="", extra={}, files=files, tensors=()).write(path / MANIFEST)
    (path / "state").write_bytes(b"cut")
    with pytest.raises(DamagedCheckpointError, match=r"(?s)lost: No such file.*state: has 3 bytes of 15"):
        folders.whole(path)


def test_an_unknown_version_is_not_taken_for_damage(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.checkpoint.manifest.FORMAT_VERSION", 99)
    path = make(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format version 99") as caught:
        folders.whole(path)
    assert not isinstance(caught.value, DamagedCheckpointError)


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_the_newest_are_kept(tmp_path, keep):
    steps = [10, 20, 30, 40]
    for step in steps:
        make(tmp_path, step)
    deleted = folders.retain(tmp_path, keep, 0, "t")
    kept = steps[-keep:] if keep else steps
    assert names(tmp_path) == [f"step-{step:06d}" for step in kept]
    assert sorted(deleted) == [f"step-{step:06d}" for step in steps if step not in kept]


def test_some_are_kept_for_good(tmp_path):
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
        folders.retain(tmp_path, 1, 20, "t")
    assert names(tmp_path) == ["step-000020", "step-000040", "step-000050"]


def test_damaged_ones_do_not_count_among_those_kept(tmp_path):
    make(tmp_path, 10)
    make(tmp_path, 20)
    (make(tmp_path, 30) / "state").unlink()
    folders.retain(tmp_path, 1, 0, "t")
    assert folders.find(tmp_path).step == 20
    assert names(tmp_path) == ["step-000020", "step-000030"]


def test_what_dead_runs_left_is_cleared_and_nothing_else(tmp_path):
    make(tmp_path, 10)
    left = make(tmp_path, 20).rename(tmp_path / "step-000020.tmp-abc")
    make(tmp_path, 30).rename(tmp_path / "step-000030.aside-abc")
    assert folders.clear(tmp_path) == [left.name]
    assert names(tmp_path) == ["step-000010", "step-000030.aside-abc"]


def test_newer_ones_are_set_aside_not_deleted(tmp_path):
    for step in (10, 20, 30):
        make(tmp_path, step)
    aside = folders.set_aside(tmp_path, 10)
    assert len(aside) == 2
    assert [step for step, _ in folders.checkpoints(tmp_path)] == [10]
    assert all((tmp_path / name / "state").exists() for name in aside)
